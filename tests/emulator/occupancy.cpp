// Python interface of NVIDIA's occupancy calculator, a header of the CUDA runtime: resident blocks
// per SM of a kernel, and the limiting resources.
#include <climits>

#include <cuda_occupancy.h>

struct Chip {
  int major, minor;
  int threads_per_multiprocessor;
  int shared_per_block, shared_per_multiprocessor, reserved_shared;
};

struct Kernel {
  int registers, static_shared, launch_bounds;
  int allowed_dynamic;  // maximum dynamic shared memory; -1 if not set
};

// Returns the resident blocks, or -1 for an error; writes the bits of cudaOccLimitingFactor.
extern "C" int resident_blocks(const Chip* chip, const Kernel* kernel, int threads, int dynamic_shared,
                               unsigned* limits) {
  cudaOccDeviceProp properties;
  properties.computeMajor = chip->major;
  properties.computeMinor = chip->minor;
  properties.maxThreadsPerBlock = 1024;
  properties.maxThreadsPerMultiprocessor = chip->threads_per_multiprocessor;
  properties.regsPerBlock = properties.regsPerMultiprocessor = 65536;
  properties.warpSize = 32;
  properties.sharedMemPerBlock = 48 << 10;
  properties.sharedMemPerMultiprocessor = chip->shared_per_multiprocessor;
  properties.numSms = 1;
  properties.sharedMemPerBlockOptin = chip->shared_per_block;
  properties.reservedSharedMemPerBlock = chip->reserved_shared;

  cudaOccFuncAttributes attributes;
  attributes.maxThreadsPerBlock = kernel->launch_bounds ? kernel->launch_bounds : INT_MAX;
  attributes.numRegs = kernel->registers;
  attributes.sharedSizeBytes = kernel->static_shared;
  attributes.numBlockBarriers = 1;
  if (kernel->allowed_dynamic >= 0) {
    attributes.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    attributes.maxDynamicSharedSizeBytes = kernel->allowed_dynamic;
  }

  cudaOccResult result = {};
  const cudaOccDeviceState state;
  if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &properties, &attributes, &state, threads,
                                              dynamic_shared) != CUDA_OCC_SUCCESS)
    return -1;
  *limits = result.limitingFactors;
  return result.activeBlocksPerMultiprocessor;
}
