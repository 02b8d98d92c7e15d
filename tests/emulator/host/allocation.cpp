// Functions of the compiled C++ library that the runtime needs, so that zig does not build it.
#include <cstdlib>
#include <new>
#include <string>

void* operator new(size_t size) {
  void* memory = malloc(size);
  if (!memory) abort();
  return memory;
}
void operator delete(void* memory) noexcept { free(memory); }
void operator delete(void* memory, size_t) noexcept { free(memory); }

#ifdef _LIBCPP_VERSION
template class std::basic_string<char>;
#endif
