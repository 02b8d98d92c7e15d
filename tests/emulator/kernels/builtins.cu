// Built-ins that NVRTC and cuda_builtins.h implement differently: one result per column.
__device__ const float table[4] = {1.5f, -2.5f, 3.25f, 100.0f};
__constant__ int twice[3] = {2, 4, 6};

extern "C" __global__ void __launch_bounds__(64)
    builtins(const int* __restrict__ ints, const float* __restrict__ floats,
             const double* __restrict__ doubles, unsigned* __restrict__ out,
             unsigned* __restrict__ counters) {
  __shared__ int tile[64];
  __shared__ unsigned long long wide[2];
  const int t = threadIdx.x;
  const int a = ints[t], b = ints[t + 64], c = ints[t + 128];
  const float x = floats[t], y = floats[t + 64];
  unsigned* column = out + t * 48;
  auto put = [&column](unsigned value) { *column++ = value; };
  put(__byte_perm(a, b, c));
  put((unsigned)a + (unsigned)b), put((unsigned)a * (unsigned)b);
  put(__mulhi(a, b)), put(__umulhi(a, b));
  put((unsigned)a / (b | 1)), put(a % (b | 1)), put(a >> (b & 31)), put((unsigned)a >> (c & 31));
  put(__funnelshift_l(a, b, c)), put(__funnelshift_r(a, b, c));
  put(__popc(a)), put(__clz(a)), put(__clz(a & 3)), put(__brev(a));
  const long long product = (long long)a * b;
  put((unsigned)(product >> 32)), put((unsigned)(product / (c | 1)));
  put((unsigned)__mul64hi(product, product)), put(__popcll(product));
  put(min(a, b)), put(max((unsigned)a, (unsigned)b)), put(abs(a));
  put(x < y), put(x <= y), put(!(x > y)), put(x != y), put(x == y), put(!(x < y) && !(x > y));
  put(__float_as_uint(fminf(x, y))), put(__float_as_uint(fmaxf(x, -y)));
  put(__float_as_uint((float)doubles[t])), put(__float_as_uint((float)a));
  put(__float_as_uint(__saturatef(x)));
  put((unsigned)(short)(a & 0x7fff)), put((unsigned)(unsigned char)(b & 0xff));
  int local[8];
  for (int i = 0; i < 8; i++) local[(i * 3 + c) & 7] = (a >> 8) + i;
  put(local[b & 7]);
  put(__float_as_uint(table[a & 3])), put(twice[(unsigned)b % 3]);
  tile[t] = a;
  __syncthreads();
  put(tile[(t + 1) & 63]);
  const int* either = b & 1 ? tile + (c & 63) : ints + (c & 63);  // a generic pointer
  put(*either);
  put(__shfl_xor_sync(0xffffffffu, a, 5)), put(__shfl_up_sync(0xffffffffu, a, 3, 8));
  put(__ballot_sync(0xffffffffu, b & 1)), put(__any_sync(0xffffffffu, a == 5));
  if (t < 2) wide[t] = 0;
  __syncthreads();
  atomicAdd(&counters[a & 3], 1u);
  atomicAdd(&wide[t & 1], (unsigned long long)t);
  put(__syncthreads_or(a == 12345) ? 5 : 6), put(__syncthreads_and(t < 64) ? 7 : 8);
  put(__syncthreads_count(t & 1));
  put((unsigned)wide[t & 1]);
}
