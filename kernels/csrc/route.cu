// The router, one warp a token: its logits in registers, K rounds of arg-max by shuffles.
// A plain C interface on purpose: without torch's headers it builds in seconds and suits every version of torch.
// E is 64, 128, 256 or 512, K at most 32. Same choices as the Triton and torch paths: by logit, ties to the lower index.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int THREADS = 128;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void narrow(float x, float* out) { *out = x; }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16* out) { *out = __float2bfloat16(x); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  return x;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// Lane l holds experts l, l + 32, ...
template <int PER_LANE, bool SOFTMAX>
__device__ __forceinline__ void scores(const float (&x)[PER_LANE], float (&p)[PER_LANE]) {
  if (!SOFTMAX) {
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) p[i] = sigmoid(x[i]);
    return;
  }
  float top = -INFINITY, sum = 0.f;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) top = fmaxf(top, x[i]);
  top = warp_max(top);
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) sum += p[i] = expf(x[i] - top);
  sum = warp_sum(sum);
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) p[i] /= sum;
}

// The largest of what is left in x, the lower index of equals; E - 1 for a row of NaN, which equals nothing.
template <int PER_LANE>
__device__ __forceinline__ int arg_max(const float (&x)[PER_LANE], int lane) {
  float best = -INFINITY;
  int expert = PER_LANE * 32 - 1;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++)
    if (x[i] > best) { best = x[i]; expert = i * 32 + lane; }
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    const float other = __shfl_xor_sync(~0u, best, o);
    const int other_expert = __shfl_xor_sync(~0u, expert, o);
    if (other > best || (other == best && other_expert < expert)) { best = other; expert = other_expert; }
  }
  return expert;
}

template <typename T, int E, bool SOFTMAX>
__global__ void __launch_bounds__(THREADS)
route_forward(const T* __restrict__ logits, const int32_t* __restrict__ forced, float* __restrict__ weights,
              int32_t* __restrict__ ids, int32_t* __restrict__ counts, float* __restrict__ prob_sum, int tokens, int k,
              int renorm) {
  constexpr int PER_LANE = E / 32;
  __shared__ int32_t block_counts[E];
  __shared__ float block_prob[E];
  for (int i = threadIdx.x; i < E; i += THREADS) { block_counts[i] = 0; block_prob[i] = 0.f; }
  __syncthreads();
  const int lane = threadIdx.x & 31, warps = THREADS / 32;
  float prob[PER_LANE] = {};
  for (int t = blockIdx.x * warps + (threadIdx.x >> 5); t < tokens; t += gridDim.x * warps) {
    float x[PER_LANE], p[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) x[i] = widen(logits[(int64_t)t * E + i * 32 + lane]);
    scores<PER_LANE, SOFTMAX>(x, p);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) prob[i] += p[i];
    float mine = 0.f, total = 0.f;
    int my_expert = 0;
    for (int j = 0; j < k; j++) {
      const int expert = forced ? forced[(int64_t)t * k + j] : arg_max<PER_LANE>(x, lane);
      float score = 0.f;
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (i * 32 + lane == expert) { score = p[i]; x[i] = -INFINITY; }
      score = __shfl_sync(~0u, score, expert & 31);
      total += score;
      if (lane == j) { mine = score; my_expert = expert; }
    }
    if (lane < k) {
      weights[(int64_t)t * k + lane] = renorm ? mine / total : mine;
      ids[(int64_t)t * k + lane] = my_expert;
      atomicAdd(&block_counts[my_expert], 1);
    }
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) atomicAdd(&block_prob[i * 32 + lane], prob[i]);
  __syncthreads();
  for (int i = threadIdx.x; i < E; i += THREADS) {
    if (block_counts[i]) atomicAdd(&counts[i], block_counts[i]);
    atomicAdd(&prob_sum[i], block_prob[i]);
  }
}

template <typename T, int E, bool SOFTMAX>
__global__ void __launch_bounds__(THREADS)
route_backward(const T* __restrict__ logits, const int32_t* __restrict__ ids, const float* __restrict__ weights,
               const float* __restrict__ grad_weights, T* __restrict__ grad, int tokens, int k, int renorm) {
  constexpr int PER_LANE = E / 32;
  const int lane = threadIdx.x & 31, warps = THREADS / 32;
  for (int t = blockIdx.x * warps + (threadIdx.x >> 5); t < tokens; t += gridDim.x * warps) {
    float w = 0.f, d = 0.f, out[PER_LANE] = {};
    int id = -1;
    if (lane < k) {
      w = weights[(int64_t)t * k + lane];
      id = ids[(int64_t)t * k + lane];
      d = w * grad_weights[(int64_t)t * k + lane];
    }
    const float total = warp_sum(d);
    if (renorm) d -= w * total;
    if (SOFTMAX && !renorm) {
      float x[PER_LANE];
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) x[i] = widen(logits[(int64_t)t * E + i * 32 + lane]);
      scores<PER_LANE, true>(x, out);
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) out[i] *= -total;
    }
    if (!SOFTMAX && id >= 0) d *= sigmoid(-widen(logits[(int64_t)t * E + id]));
    for (int j = 0; j < k; j++) {
      const int expert = __shfl_sync(~0u, id, j);
      const float of_expert = __shfl_sync(~0u, d, j);
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (i * 32 + lane == expert) out[i] += of_expert;
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) narrow(out[i], &grad[(int64_t)t * E + i * 32 + lane]);
  }
}

// Enough blocks to fill the GPU several times over, each with many tokens, so that counts meet in shared memory.
int blocks(int tokens) {
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  if (cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return 0;
  const int wanted = (tokens + THREADS / 32 - 1) / (THREADS / 32);
  return wanted < 8 * processors ? wanted : 8 * processors;
}

template <typename T, int E>
void launch_forward(const void* logits, const int32_t* forced, float* weights, int32_t* ids, int32_t* counts,
                    float* prob_sum, int tokens, int k, int softmax, int renorm, cudaStream_t stream) {
  const auto kernel = softmax ? route_forward<T, E, true> : route_forward<T, E, false>;
  kernel<<<blocks(tokens), THREADS, 0, stream>>>((const T*)logits, forced, weights, ids, counts, prob_sum, tokens, k,
                                                 renorm);
}

template <typename T, int E>
void launch_backward(const void* logits, const int32_t* ids, const float* weights, const float* grad_weights,
                     void* grad, int tokens, int k, int softmax, int renorm, cudaStream_t stream) {
  const auto kernel = softmax ? route_backward<T, E, true> : route_backward<T, E, false>;
  kernel<<<blocks(tokens), THREADS, 0, stream>>>((const T*)logits, ids, weights, grad_weights, (T*)grad, tokens, k,
                                                 renorm);
}

}  // namespace

#define BY_EXPERTS(TYPE, LAUNCH, ...)                       \
  switch (experts) {                                        \
    case 64: LAUNCH<TYPE, 64>(__VA_ARGS__); break;          \
    case 128: LAUNCH<TYPE, 128>(__VA_ARGS__); break;        \
    case 256: LAUNCH<TYPE, 256>(__VA_ARGS__); break;        \
    case 512: LAUNCH<TYPE, 512>(__VA_ARGS__); break;        \
    default: return (int)cudaErrorInvalidValue;             \
  }

// Both return a cudaError_t. forced may be null; counts and prob_sum come zeroed; bf16 tells the type of the logits.
extern "C" int rsi_route_forward(const void* logits, const void* forced, void* weights, void* ids, void* counts,
                                 void* prob_sum, int bf16, int tokens, int experts, int k, int softmax, int renorm,
                                 void* stream) {
  if (k < 1 || k > 32 || k > experts) return (int)cudaErrorInvalidValue;
#define ARGS                                                                                                      \
  logits, (const int32_t*)forced, (float*)weights, (int32_t*)ids, (int32_t*)counts, (float*)prob_sum, tokens, k, \
      softmax, renorm, (cudaStream_t)stream
  if (bf16) {
    BY_EXPERTS(__nv_bfloat16, launch_forward, ARGS)
  } else {
    BY_EXPERTS(float, launch_forward, ARGS)
  }
#undef ARGS
  return (int)cudaGetLastError();
}

extern "C" int rsi_route_backward(const void* logits, const void* ids, const void* weights, const void* grad_weights,
                                  void* grad, int bf16, int tokens, int experts, int k, int softmax, int renorm,
                                  void* stream) {
  if (k < 1 || k > 32 || k > experts) return (int)cudaErrorInvalidValue;
#define ARGS                                                                                                  \
  logits, (const int32_t*)ids, (const float*)weights, (const float*)grad_weights, grad, tokens, k, softmax, \
      renorm, (cudaStream_t)stream
  if (bf16) {
    BY_EXPERTS(__nv_bfloat16, launch_backward, ARGS)
  } else {
    BY_EXPERTS(float, launch_backward, ARGS)
  }
#undef ARGS
  return (int)cudaGetLastError();
}
