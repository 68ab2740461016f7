// SPDX-License-Identifier: Apache-2.0
#pragma once
/// An execution model of CUDA on the host, for tests alone: the bodies in cuda/ compiled by a host compiler and run
/// under the address sanitizer. Streams, events and graphs: cuda_runtime.cpp.
///
/// One block after the other; the threads of a block are fibers that run until they wait for each other, a warp as far
/// as it can before the next. Barriers, shuffles, ballots, atomics, shared memory and `wmma` fragments behave as CUDA
/// says. Blocks and threads run in ascending or descending order (`model::set_order`): a result that depends on it is a
/// race. `Settings` has harsher ways to run, one of which finds races by what orders accesses (races.h). What it cannot
/// show: what a GPU makes of a missing order, and speed.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "races.h"

// Kernels load under a condition and store under the same one, which GCC does not see through a fiber's place.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
/// A function of the model that is compiled into kernels: its accesses are not theirs, but for those that it tells of.
#define KVKEEP_OF_MODEL __attribute__((no_sanitize("thread"), noinline))
#define KVKEEP_SHARED(Type, name, count) auto& name = ::kvkeep::cuda::model::static_shared<Type, (count)>([] {})

namespace kvkeep::cuda {
namespace model {

/// Where the running fiber stands.
struct Place {
  dim3 thread, block, threads, blocks;
  std::byte* shared = nullptr;
};
[[nodiscard]] const Place& here();

/// Harsher ways to run, from the variable KVKEEP_CUDA_MODEL: words of `truncate`, `exp2`, `guard`, `races`,
/// `host`, `seed=N`, `shared=N`, with commas between them.
struct Settings {
  bool truncate = false;   ///< matrix units cut the addends of a sum off where the largest one ends, as hardware does
  bool exp2 = false;       ///< approximate functions are off by up to two units in the last place, either way
  bool guard = false;      ///< the host cannot touch device memory but by copies: see device_memory.h
  bool host = false;       ///< accelerators are on the CPU, whose tensors are then device memory
  bool races = false;      ///< a launch throws when accesses of its threads are not ordered: see races.h
  std::uint64_t seed = 0;  ///< not 0: Order::random, from this number
};
/// What KVKEEP_CUDA_MODEL says; a test may change it for a while.
[[nodiscard]] Settings& settings();

enum class Order : std::uint8_t {
  ascending,
  descending,
  random  ///< up to four blocks at a time; warps and lanes stop anywhere and go on in any order
};
/// In which order blocks start, and warps and threads between two barriers. Settings::seed overrides it.
void set_order(Order order);

/// Runs `body` in every thread of the grid, which launch() has checked. Throws std::logic_error when threads wait for
/// each other in vain, or a block takes more than `most_shared` bytes of shared memory, static and dynamic together. An
/// exception of a body ends the run.
///
/// early: the kernel may have begun while the one before it was at work. Every thread runs up to wait_for_earlier() on
/// its own; one that ends, or waits for others, before it gets there is a std::logic_error. Until the first block is
/// there, device memory is closed under Settings::guard.
void run(const char* name, dim3 blocks, int threads, std::size_t shared_bytes, std::size_t most_shared, bool early,
         const std::function<void()>& body);
/// griddepcontrol.wait.
void wait_for_earlier();

/// The name of the kernel that is launched next, for what is said of it.
void name_launch(const char* name);
/// As cudaLaunchKernelExC(): `body` holds the arguments as they are now, and runs in the order of the stream. On a
/// stream that is being captured it runs with every replay of the graph. A kernel that has not asked for more has 48
/// KiB of shared memory, static and dynamic together. The one attribute that is known is programmatic serialization on
/// a stream: see run().
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, std::function<void()> body);

/// While true, what streams are given waits until somebody waits for it. Then streams go on one piece of work at a time
/// until it has run: those alone that must, or, with a seed, any that events let go on. Else it runs at once.
void hold_streams(bool hold, std::uint64_t seed = 0);

/// What the runtime says that the chip has, and a launch is held to.
struct Chip {
  int shared_bytes = 227 << 10;  ///< that a block can ask for
  int multiprocessors = 2;
  int compiled_for = 90;  ///< that kernels were compiled for
};
[[nodiscard]] Chip& chip();

/// Waits for all threads of the block. Returns how many of them said `counts`.
unsigned wait_block(bool counts = false);
/// Waits for the lanes of `mask`, and orders what they do before and after it if `orders`.
void wait_warp(unsigned mask, bool orders);
/// Where other blocks may see a difference: lets them run, in random order.
void give_way();
void fence();
/// Begins a copy to shared memory, which lands with land_copies(). `code`: what asked for it.
void begin_copy(void* to, const void* from, std::size_t bytes, const void* code);
void land_copies();
/// Every lane of `mask` gives `bytes` and sees what all gave: [32][bytes]. Valid until the lane's next call.
const std::byte* exchange(unsigned mask, const void* mine, std::size_t bytes);
[[nodiscard]] int lane();

/// Blocks, barriers and exchanges since the program began: proof that kernels ran.
struct Counters {
  std::int64_t launches = 0, blocks = 0, barriers = 0, exchanges = 0;
  std::int64_t waits = 0;        ///< of the host for a stream
  std::int64_t allocations = 0;  ///< of device memory by an accelerator
};
[[nodiscard]] const Counters& counters();
/// Counts a wait, or an allocation.
void waited();
void allocated();

/// Static shared memory of the running block for the declaration `site`: the same for all its threads, garbage at
/// first.
[[nodiscard]] std::byte* static_shared_memory(const void* site, std::size_t bytes);
/// An array of it. Site: a type of its own for every declaration.
template <class T, std::size_t N, class Site>
T (&static_shared(Site))
[N] {
  static const char site = 0;
  return *reinterpret_cast<T(*)[N]>(static_shared_memory(&site, sizeof(T) * N));
}

/// What an approximate function gives where `exact` would be right.
[[nodiscard]] float approximate(float exact);
/// What a matrix unit adds up: `sum` and 16 products, which are exact in f32.
[[nodiscard]] float matrix_sum(float sum, const std::array<float, 16>& products);

template <class T>
KVKEEP_OF_MODEL T from_lane(unsigned mask, T value, int source) {
  static_assert(std::is_trivially_copyable_v<T>);
  const std::byte* all = exchange(mask, &value, sizeof(T));
  T out;
  std::memcpy(&out, all + static_cast<std::size_t>(source) * sizeof(T), sizeof(T));
  return out;
}

}  // namespace model

inline std::byte* dynamic_shared() { return model::here().shared; }

}  // namespace kvkeep::cuda

#define threadIdx (::kvkeep::cuda::model::here().thread)
#define blockIdx (::kvkeep::cuda::model::here().block)
#define blockDim (::kvkeep::cuda::model::here().threads)
#define gridDim (::kvkeep::cuda::model::here().blocks)
inline constexpr int warpSize = 32;

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  return kvkeep::cuda::model::launch(
      *config, reinterpret_cast<const void*>(kernel),
      [kernel, copied = std::tuple<Parameters...>(std::forward<Arguments>(arguments)...)] {
        std::apply(kernel, copied);
      });
}

inline void __syncthreads() { kvkeep::cuda::model::wait_block(); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFU) { kvkeep::cuda::model::wait_warp(mask, true); }
inline void __threadfence() { kvkeep::cuda::model::fence(); }
inline void __threadfence_block() = delete;  // no kernel needs its order, so the model does not know it

inline int __syncthreads_count(int predicate) {
  return static_cast<int>(kvkeep::cuda::model::wait_block(predicate != 0));
}
inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) > 0 ? 1 : 0; }

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int lane = kvkeep::cuda::model::lane();
  return kvkeep::cuda::model::from_lane(mask, value, lane / width * width + (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const int lane = kvkeep::cuda::model::lane(), source = lane ^ bits;
  return kvkeep::cuda::model::from_lane(mask, value, source / width <= lane / width ? source : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = kvkeep::cuda::model::lane(), source = lane + static_cast<int>(delta);
  return kvkeep::cuda::model::from_lane(mask, value, source / width == lane / width ? source : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = kvkeep::cuda::model::lane(), source = lane - static_cast<int>(delta);
  return kvkeep::cuda::model::from_lane(mask, value, source >= lane / width * width ? source : lane);
}
KVKEEP_OF_MODEL inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const auto mine = static_cast<std::uint8_t>(predicate != 0);
  const std::byte* all = kvkeep::cuda::model::exchange(mask, &mine, 1);
  unsigned votes = 0;
  for (unsigned i = 0; i < 32; ++i)
    if ((mask >> i & 1U) != 0 && all[i] != std::byte{0}) votes |= 1U << i;
  return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0 ? 1 : 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask ? 1 : 0; }
template <class T, class Combine>
KVKEEP_OF_MODEL T reduce_warp(unsigned mask, T value, T neutral, const Combine& combine) {
  const std::byte* all = kvkeep::cuda::model::exchange(mask, &value, sizeof value);
  T out = neutral;
  for (unsigned i = 0; i < 32; ++i) {
    T other = 0;
    std::memcpy(&other, all + i * sizeof other, sizeof other);
    if ((mask >> i & 1U) != 0) out = combine(out, other);
  }
  return out;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) { return reduce_warp(mask, value, 0U, std::plus<>{}); }
inline int __reduce_max_sync(unsigned mask, int value) {
  return reduce_warp(mask, value, std::numeric_limits<int>::min(), [](int a, int b) { return std::max(a, b); });
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value) {
  return reduce_warp(mask, value, ~0U, std::bit_and<>{});
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  return reduce_warp(mask, value, 0U, std::bit_or<>{});
}
inline unsigned __activemask() = delete;  // says nothing that a kernel may rely on

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  unsigned out = 0;
  for (unsigned byte = 0; byte < 4; ++byte) {
    const unsigned from = selector >> 4 * byte & 7U;
    out |= ((from < 4 ? low >> 8 * from : high >> 8 * (from - 4)) & 0xFFU) << 8 * byte;
  }
  return out;
}

template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
T __ldcg(const T* at) {
  return *at;
}
inline float __expf(float x) { return kvkeep::cuda::model::approximate(std::exp(x)); }
inline float __fdividef(float a, float b) { return kvkeep::cuda::model::approximate(a / b); }
inline float __frcp_rn(float x) { return 1.0F / x; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float rsqrtf(float x) { return kvkeep::cuda::model::approximate(1.0F / std::sqrt(x)); }
using std::max;
using std::min;

// Fibers give way only where they wait, so a plain operation is atomic.
template <class T, class Change>
KVKEEP_OF_MODEL T atomic_change(T* at, const Change& change) {
  kvkeep::cuda::model::give_way();
  kvkeep::cuda::model::touch_atomic(at, sizeof(T), __builtin_return_address(0));
  const T old = *at;
  *at = static_cast<T>(change(old));
  return old;
}
template <class T>
T atomicAdd(T* at, std::type_identity_t<T> x) {
  return atomic_change(at, [x](T old) { return old + x; });
}
template <class T>
T atomicMax(T* at, std::type_identity_t<T> x) {
  return atomic_change(at, [x](T old) { return std::max(old, x); });
}
template <class T>
T atomicMin(T* at, std::type_identity_t<T> x) {
  return atomic_change(at, [x](T old) { return std::min(old, x); });
}
template <class T>
T atomicOr(T* at, std::type_identity_t<T> x) {
  return atomic_change(at, [x](T old) { return old | x; });
}

namespace kvkeep::cuda {

inline float exp2_of(float x) {
  const float y = model::approximate(std::exp2(x));
  return std::fabs(y) < std::numeric_limits<float>::min() ? 0.0F : y;
}

/// Copies land when their thread waits for them: whoever reads too early reads what was there before.
template <int kBytes = 16>
KVKEEP_OF_MODEL void copy_ahead(void* shared, const void* global) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  if ((reinterpret_cast<std::uintptr_t>(shared) | reinterpret_cast<std::uintptr_t>(global)) % kBytes != 0)
    throw std::logic_error("copy_ahead: an address that is no multiple of its bytes");
  model::begin_copy(shared, global, kBytes, __builtin_return_address(0));
}
inline void wait_for_copies() { model::land_copies(); }

inline void fetch_ahead(const void*) {}

inline void wait_for_earlier_kernels() { model::wait_for_earlier(); }

/// mma.m16n8k16, with the fragments as PTX lays them out.
template <class S>
KVKEEP_OF_MODEL void multiply_add(float (&sum)[4], const unsigned (&left)[4], const unsigned (&right)[2]) {
  struct Both {
    S left[8], right[4];
  } mine;
  std::memcpy(mine.left, left, sizeof mine.left);
  std::memcpy(mine.right, right, sizeof mine.right);
  const auto* all = reinterpret_cast<const Both*>(model::exchange(0xFFFFFFFFU, &mine, sizeof mine));
  for (int i = 0; i < 4; ++i) {
    const int row = model::lane() / 4 + i / 2 * 8, column = model::lane() % 4 * 2 + i % 2;
    std::array<float, 16> products;
    for (int k = 0; k < 16; ++k) {
      const int pair = k % 8 / 2, upper = k / 8;
      products[static_cast<std::size_t>(k)] =
          static_cast<float>(all[row % 8 * 4 + pair].left[upper * 4 + row / 8 * 2 + k % 2]) *
          static_cast<float>(all[column * 4 + pair].right[upper * 2 + k % 2]);
    }
    sum[i] = model::matrix_sum(sum[i], products);
  }
}

/// `nvcuda::wmma` for 16 x 16 x 16 tiles: an element's place in a fragment is the model's own, as CUDA leaves it open
/// too, and like no order that a kernel has reason to take.
namespace wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment {
  static_assert(M == 16 && N == 16 && K == 16, "the model knows 16 x 16 x 16");
  static constexpr int num_elements = 8;
  T x[num_elements];  ///< see place()
};

template <class Fragment, class T>
void fill_fragment(Fragment& f, T value) {
  for (auto& x : f.x) x = value;
}

namespace detail {
template <class Layout>
constexpr bool kColumns = std::is_same_v<Layout, col_major>;
/// Which element of the tile, in row-major order, is element i of a lane; and which of all lanes' it is.
inline int place(int i) { return (model::lane() * 8 + i) * 37 % 256; }
inline int holder(int element) { return element * 173 % 256; }  // 37 * 173 = 25 * 256 + 1
/// Where element i of the lane is in memory.
inline std::ptrdiff_t offset(int i, unsigned stride, bool columns) {
  const int r = place(i) / 16, c = place(i) % 16;
  return columns ? c * static_cast<std::ptrdiff_t>(stride) + r : r * static_cast<std::ptrdiff_t>(stride) + c;
}

template <class Fragment, class T>
KVKEEP_OF_MODEL void load(Fragment& f, const T* at, unsigned stride, bool columns, const void* code) {
  model::wait_warp(0xFFFFFFFFU, false);
  for (int i = 0; i < 8; ++i) {
    const T* const element = at + offset(i, stride, columns);
    model::touch(element, sizeof(T), model::Touch::read, code);
    f.x[i] = *element;
  }
}
}  // namespace detail

template <class Use, class T, class Layout>
KVKEEP_OF_MODEL void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout>& f, const T* at, unsigned stride) {
  detail::load(f, at, stride, detail::kColumns<Layout>, __builtin_return_address(0));
}

template <class T>
KVKEEP_OF_MODEL void load_matrix_sync(fragment<accumulator, 16, 16, 16, T>& f, const T* at, unsigned stride,
                                      layout_t layout) {
  detail::load(f, at, stride, layout == mem_col_major, __builtin_return_address(0));
}

template <class T>
KVKEEP_OF_MODEL void store_matrix_sync(T* at, const fragment<accumulator, 16, 16, 16, T>& f, unsigned stride,
                                       layout_t layout) {
  for (int i = 0; i < 8; ++i) {
    T* const element = at + detail::offset(i, stride, layout == mem_col_major);
    model::touch(element, sizeof(T), model::Touch::write, __builtin_return_address(0));
    *element = f.x[i];
  }
  model::wait_warp(0xFFFFFFFFU, false);
}

template <class T, class LayoutA, class LayoutB>
KVKEEP_OF_MODEL void mma_sync(fragment<accumulator, 16, 16, 16, float>& d,
                              const fragment<matrix_a, 16, 16, 16, T, LayoutA>& a,
                              const fragment<matrix_b, 16, 16, 16, T, LayoutB>& b,
                              const fragment<accumulator, 16, 16, 16, float>& c) {
  struct Both {
    T a[8], b[8];
  } mine;
  std::memcpy(mine.a, a.x, sizeof mine.a);
  std::memcpy(mine.b, b.x, sizeof mine.b);
  const auto* all = reinterpret_cast<const Both*>(model::exchange(0xFFFFFFFFU, &mine, sizeof mine));
  for (int i = 0; i < 8; ++i) {
    const int r = detail::place(i) / 16, col = detail::place(i) % 16;
    std::array<float, 16> products;
    for (int k = 0; k < 16; ++k) {
      const int ia = detail::holder(r * 16 + k), ib = detail::holder(k * 16 + col);
      products[static_cast<std::size_t>(k)] =
          static_cast<float>(all[ia / 8].a[ia % 8]) * static_cast<float>(all[ib / 8].b[ib % 8]);
    }
    d.x[i] = model::matrix_sum(c.x[i], products);
  }
}

}  // namespace wmma
}  // namespace kvkeep::cuda
