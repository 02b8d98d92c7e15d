// The functions of CUDA's runtime that CuPy calls, implemented with the driver's functions.  Linked
// into CuPy's own cupy_backends.cuda.api.runtime instead of NVIDIA's runtime.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>

#include "names.h"  // runtime_error_name(), made from driver_types.h

namespace {

thread_local cudaError_t last_error = cudaSuccess;

// Both APIs use the same numbers.
cudaError_t as_error(CUresult status) {
  if (status) last_error = static_cast<cudaError_t>(status);
  return static_cast<cudaError_t>(status);
}
CUdeviceptr device(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

// Sets the first device's context in a thread that has none, as the runtime's first call does.
CUresult use_context() {
  CUcontext context = nullptr;
  CUresult status = cuCtxGetCurrent(&context);
  if (status || context) return status;
  status = cuDevicePrimaryCtxRetain(&context, 0);
  return status ? status : cuCtxSetCurrent(context);
}

}  // namespace

// Calls the driver with a current context.
#define CALL(call)                                \
  do {                                            \
    const CUresult context_ = use_context();      \
    return as_error(context_ ? context_ : (call)); \
  } while (0)

extern "C" {

const char* cudaGetErrorName(cudaError_t error) { return runtime_error_name(error); }
const char* cudaGetErrorString(cudaError_t error) {
  const char* text = nullptr;
  cuGetErrorString((CUresult)error, &text);
  return text ? text : runtime_error_name(error);
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  return last_error = cudaSuccess, error;
}

// --- device ---
cudaError_t cudaDriverGetVersion(int* version) { return as_error(cuDriverGetVersion(version)); }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDevice(int* ordinal) { CALL(cuCtxGetDevice(ordinal)); }
cudaError_t cudaSetDevice(int ordinal) {
  CUcontext context = nullptr;
  const CUresult status = cuDevicePrimaryCtxRetain(&context, ordinal);
  return as_error(status ? status : cuCtxSetCurrent(context));
}
cudaError_t cudaGetDeviceCount(int* count) { return as_error(cuDeviceGetCount(count)); }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int ordinal) {
  return as_error(cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, ordinal));
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int room, int ordinal) {
  return as_error(cuDeviceGetPCIBusId(id, room, ordinal));
}
cudaError_t cudaDeviceGetByPCIBusId(int* ordinal, const char* id) {
  return as_error(cuDeviceGetByPCIBusId(ordinal, id));
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* made, int ordinal) {
  std::memset(made, 0, sizeof *made);
  CUresult status = cuDeviceGetName(made->name, sizeof made->name, ordinal);
  if (status) return as_error(status);
  cuDeviceTotalMem(&made->totalGlobalMem, ordinal);
  cuDeviceGetUuid((CUuuid*)&made->uuid, ordinal);
#define TAKE(field, name)                                                                 \
  do {                                                                                    \
    int value_ = 0;                                                                       \
    status = cuDeviceGetAttribute(&value_, CU_DEVICE_ATTRIBUTE_##name, ordinal);          \
    if (status) return as_error(status);                                                  \
    made->field = (__typeof__(made->field))value_;                                        \
  } while (0)
  TAKE(major, COMPUTE_CAPABILITY_MAJOR);
  TAKE(minor, COMPUTE_CAPABILITY_MINOR);
  TAKE(multiProcessorCount, MULTIPROCESSOR_COUNT);
  TAKE(maxThreadsPerBlock, MAX_THREADS_PER_BLOCK);
  TAKE(maxThreadsDim[0], MAX_BLOCK_DIM_X);
  TAKE(maxThreadsDim[1], MAX_BLOCK_DIM_Y);
  TAKE(maxThreadsDim[2], MAX_BLOCK_DIM_Z);
  TAKE(maxGridSize[0], MAX_GRID_DIM_X);
  TAKE(maxGridSize[1], MAX_GRID_DIM_Y);
  TAKE(maxGridSize[2], MAX_GRID_DIM_Z);
  TAKE(sharedMemPerBlock, MAX_SHARED_MEMORY_PER_BLOCK);
  TAKE(sharedMemPerBlockOptin, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  TAKE(sharedMemPerMultiprocessor, MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  TAKE(regsPerBlock, MAX_REGISTERS_PER_BLOCK);
  TAKE(regsPerMultiprocessor, MAX_REGISTERS_PER_MULTIPROCESSOR);
  TAKE(maxThreadsPerMultiProcessor, MAX_THREADS_PER_MULTIPROCESSOR);
  TAKE(maxBlocksPerMultiProcessor, MAX_BLOCKS_PER_MULTIPROCESSOR);
  TAKE(warpSize, WARP_SIZE);
  TAKE(l2CacheSize, L2_CACHE_SIZE);
  TAKE(memoryBusWidth, GLOBAL_MEMORY_BUS_WIDTH);
  TAKE(unifiedAddressing, UNIFIED_ADDRESSING);
  TAKE(concurrentKernels, CONCURRENT_KERNELS);
  TAKE(textureAlignment, TEXTURE_ALIGNMENT);
#undef TAKE
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { CALL(cuCtxSynchronize()); }
cudaError_t cudaDeviceCanAccessPeer(int* can, int ordinal, int peer) {
  return as_error(cuDeviceCanAccessPeer(can, ordinal, peer));
}

// --- memory ---
cudaError_t cudaMalloc(void** pointer, size_t size) {
  if (!size) return *pointer = nullptr, cudaSuccess;
  CALL(cuMemAlloc((CUdeviceptr*)pointer, size));
}
cudaError_t cudaMallocManaged(void** pointer, size_t size, unsigned flags) {
  CALL(cuMemAllocManaged((CUdeviceptr*)pointer, size, flags));
}
cudaError_t cudaFree(void* pointer) { CALL(cuMemFree(device(pointer))); }
cudaError_t cudaMallocAsync(void** pointer, size_t size, cudaStream_t stream) {
  CALL(cuMemAllocAsync((CUdeviceptr*)pointer, size, stream));
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  CALL(cuMemFreeAsync(device(pointer), stream));
}
cudaError_t cudaHostAlloc(void** pointer, size_t size, unsigned flags) {
  CALL(cuMemHostAlloc(pointer, size, flags));
}
cudaError_t cudaFreeHost(void* pointer) { CALL(cuMemFreeHost(pointer)); }
cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  CALL(cuMemGetInfo(available, total));
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  switch (kind) {
    case cudaMemcpyHostToDevice: CALL(cuMemcpyHtoDAsync(device(to), from, size, stream));
    case cudaMemcpyDeviceToHost: CALL(cuMemcpyDtoHAsync(to, device(from), size, stream));
    case cudaMemcpyDeviceToDevice:
      CALL(cuMemcpyDtoDAsync(device(to), device(from), size, stream));
    default: CALL(cuMemcpyAsync(device(to), device(from), size, stream));
  }
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  switch (kind) {
    case cudaMemcpyHostToDevice: CALL(cuMemcpyHtoD(device(to), from, size));
    case cudaMemcpyDeviceToHost: CALL(cuMemcpyDtoH(to, device(from), size));
    case cudaMemcpyDeviceToDevice: CALL(cuMemcpyDtoD(device(to), device(from), size));
    default: CALL(cuMemcpy(device(to), device(from), size));
  }
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  cudaError_t status = cudaSuccess;
  for (size_t row = 0; row < height && !status; row++)
    status = cudaMemcpyAsync((char*)to + row * to_pitch, (const char*)from + row * from_pitch,
                             width, kind, stream);
  return status;
}
cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                         size_t width, size_t height, cudaMemcpyKind kind) {
  return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, nullptr);
}
cudaError_t cudaMemset(void* to, int value, size_t size) {
  CALL(cuMemsetD8(device(to), (unsigned char)value, size));
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t size, cudaStream_t stream) {
  CALL(cuMemsetD8Async(device(to), (unsigned char)value, size, stream));
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* made, const void* pointer) {
  std::memset(made, 0, sizeof *made);
  made->device = -2;
  unsigned type = 0;
  const CUdeviceptr address = device(pointer);
  if (cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)) {
    made->type = cudaMemoryTypeUnregistered, made->hostPointer = (void*)pointer;
    return cudaSuccess;
  }
  const bool on_device = type == CU_MEMORYTYPE_DEVICE;
  cuPointerGetAttribute(&made->device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address);
  made->type = on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  made->devicePointer = (void*)pointer;
  made->hostPointer = on_device ? nullptr : (void*)pointer;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int ordinal) {
  return as_error(cuDeviceGetDefaultMemPool(pool, ordinal));
}
cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* pool, int ordinal) {
  return as_error(cuDeviceGetMemPool(pool, ordinal));
}
cudaError_t cudaDeviceSetMemPool(int ordinal, cudaMemPool_t pool) {
  return as_error(cuDeviceSetMemPool(ordinal, pool));
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t size) {
  CALL(cuMemPoolTrimTo(pool, size));
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr name, void* value) {
  CALL(cuMemPoolGetAttribute(pool, (CUmemPool_attribute)name, value));
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr name, void* value) {
  CALL(cuMemPoolSetAttribute(pool, (CUmemPool_attribute)name, value));
}

// --- streams and events ---
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  CALL(cuStreamCreateWithPriority(stream, flags, priority));
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  CALL(cuStreamCreate(stream, flags));
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  CALL(cuStreamGetFlags(stream, flags));
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  CALL(cuStreamGetPriority(stream, priority));
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return as_error(cuStreamDestroy(stream)); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  CALL(cuStreamSynchronize(stream));
}
cudaError_t cudaStreamQuery(cudaStream_t stream) { CALL(cuStreamQuery(stream)); }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  CALL(cuStreamWaitEvent(stream, event, flags));
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  CALL(cuLaunchHostFunc(stream, function, argument));
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  CALL(cuStreamBeginCapture(stream, (CUstreamCaptureMode)mode));
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  CALL(cuStreamEndCapture(stream, graph));
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  CALL(cuStreamIsCapturing(stream, (CUstreamCaptureStatus*)status));
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  CALL(cuEventCreate(event, flags));
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return as_error(cuEventDestroy(event)); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  CALL(cuEventRecord(event, stream));
}
cudaError_t cudaEventQuery(cudaEvent_t event) { CALL(cuEventQuery(event)); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { CALL(cuEventSynchronize(event)); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop) {
  CALL(cuEventElapsedTime(milliseconds, start, stop));
}

// --- graphs ---
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph,
                                 unsigned long long flags) {
  CALL(cuGraphInstantiate(made, graph, flags));
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  CALL(cuGraphLaunch(graph, stream));
}
cudaError_t cudaGraphUpload(cudaGraphExec_t graph, cudaStream_t stream) {
  CALL(cuGraphUpload(graph, stream));
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return as_error(cuGraphDestroy(graph)); }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  return as_error(cuGraphExecDestroy(graph));
}

}  // extern "C"
