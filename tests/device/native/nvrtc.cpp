// Wrapper of NVIDIA's libnvrtc.so: forwards every call and appends to each cubin the inputs that it
// was compiled from, as zero-terminated texts (programs.py reads them):
//   mark, log, name, source, number of headers, (name, text) of each, number of options, each option
#include <nvrtc.h>

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr char kMark[] = "compiled for tests/device";

struct Program {
  nvrtcProgram real = nullptr;
  std::string name, source;
  std::vector<std::string> headers;  // name, text, name, text, ...
  std::vector<std::string> options;
};

void* real;

Program* own(nvrtcProgram program) { return reinterpret_cast<Program*>(program); }
std::string text(const char* value) { return value ? value : ""; }

#define REAL(name) reinterpret_cast<decltype(&name)>(dlsym(real, #name))

void add(std::string& all, const std::string& part) { all.append(part).push_back('\0'); }
void add(std::string& all, const std::vector<std::string>& parts, size_t count) {
  char digits[24];
  snprintf(digits, sizeof digits, "%zu", count);
  add(all, digits);
  for (const std::string& part : parts) add(all, part);
}

// Returns the bytes to append to a cubin.
std::string trailer(const Program& program) {
  size_t size = 0;
  std::string log;
  if (!REAL(nvrtcGetProgramLogSize)(program.real, &size)) {
    log.resize(size);
    REAL(nvrtcGetProgramLog)(program.real, log.data());
  }
  std::string all;
  add(all, kMark);
  add(all, text(log.c_str()));
  add(all, program.name);
  add(all, program.source);
  add(all, program.headers, program.headers.size() / 2);
  add(all, program.options, program.options.size());
  return all + '\0';  // CuPy drops the last byte as a terminator
}

}  // namespace

extern "C" {

int device_set_nvrtc(const char* path) {
  real = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  return real != nullptr;
}

const char* nvrtcGetErrorString(nvrtcResult result) { return REAL(nvrtcGetErrorString)(result); }
nvrtcResult nvrtcVersion(int* major, int* minor) { return REAL(nvrtcVersion)(major, minor); }
nvrtcResult nvrtcGetNumSupportedArchs(int* count) { return REAL(nvrtcGetNumSupportedArchs)(count); }
nvrtcResult nvrtcGetSupportedArchs(int* archs) { return REAL(nvrtcGetSupportedArchs)(archs); }

nvrtcResult nvrtcCreateProgram(nvrtcProgram* result, const char* source, const char* name, int count,
                               const char* const* headers, const char* const* header_names) {
  auto* program = new Program{nullptr, text(name), text(source), {}, {}};
  for (int i = 0; i < count; i++) {
    program->headers.push_back(text(header_names[i]));
    program->headers.push_back(text(headers[i]));
  }
  *result = reinterpret_cast<nvrtcProgram>(program);
  return REAL(nvrtcCreateProgram)(&program->real, source, name, count, headers, header_names);
}
nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
  const nvrtcResult status = REAL(nvrtcDestroyProgram)(&own(*program)->real);
  delete own(*program);
  *program = nullptr;
  return status;
}
nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count, const char* const* options) {
  own(program)->options.assign(options, options + count);
  return REAL(nvrtcCompileProgram)(own(program)->real, count, options);
}
nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t* size) {
  const nvrtcResult status = REAL(nvrtcGetCUBINSize)(own(program)->real, size);
  if (!status && *size) *size += trailer(*own(program)).size();
  return status;
}
nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char* cubin) {
  const nvrtcResult status = REAL(nvrtcGetCUBIN)(own(program)->real, cubin);
  size_t size = 0;
  if (!status && !REAL(nvrtcGetCUBINSize)(own(program)->real, &size)) {
    const std::string more = trailer(*own(program));
    std::memcpy(cubin + size, more.data(), more.size());
  }
  return status;
}
nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t* size) {
  return REAL(nvrtcGetPTXSize)(own(program)->real, size);
}
nvrtcResult nvrtcGetPTX(nvrtcProgram program, char* ptx) {
  return REAL(nvrtcGetPTX)(own(program)->real, ptx);
}
nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t* size) {
  return REAL(nvrtcGetProgramLogSize)(own(program)->real, size);
}
nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char* log) {
  return REAL(nvrtcGetProgramLog)(own(program)->real, log);
}
nvrtcResult nvrtcAddNameExpression(nvrtcProgram program, const char* name) {
  return REAL(nvrtcAddNameExpression)(own(program)->real, name);
}
nvrtcResult nvrtcGetLoweredName(nvrtcProgram program, const char* name, const char** lowered) {
  return REAL(nvrtcGetLoweredName)(own(program)->real, name, lowered);
}

}  // extern "C"
