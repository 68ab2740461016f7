// SPDX-License-Identifier: Apache-2.0
#include "critical.h"

#include "element.cuh"
#include "kvkeep/allot/divide.h"
#include "launch.cuh"
#include "panel.cuh"
#include "select.cuh"
#include "tuning.cuh"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

using tuning::kCriticalHidden;
using tuning::kCriticalThreads;

constexpr float kEpsilon = 1e-4F;  ///< kCriticalEpsilon of the CPU

struct CriticalTask {
  CriticalArguments a;
  float* sizes;         ///< [slots] v
  std::int32_t padded;  ///< Dv in whole tiles
  std::int32_t chunks;  ///< blocks of the longest row
};

/// Slots of a row that stay.
__device__ inline std::int32_t kept_of(const CriticalArguments& a, std::int64_t r) {
  return a.counts != nullptr ? a.counts[r] : static_cast<std::int32_t>(a.indptr[r + 1] - a.indptr[r]);
}

__device__ inline bool is_cut(const CriticalArguments& a, std::int64_t r) {
  return a.evidence.limits[r].due && kept_of(a, r) < a.evidence.rows[r].length;
}

/// Calls body(row, its number, first slot) for every chunk of a row that is cut.
template <class Body>
__device__ void each_cut_chunk(const CriticalTask& task, std::int32_t chunk, Body&& body) {
  for (std::int64_t work = blockIdx.x; work < std::int64_t{task.a.evidence.count} * task.chunks; work += gridDim.x) {
    const std::int64_t r = work / task.chunks;
    const Row& row = task.a.evidence.rows[r];
    const std::int32_t begin = static_cast<std::int32_t>(work - r * task.chunks) * chunk;
    if (begin < row.length && is_cut(task.a, r)) body(row, begin);
  }
}

/// W_o of one query head of a row, hidden unit by hidden unit.
template <class W>
__device__ SlotAddress weights_of(const CriticalArguments& a, const Row& row, std::int32_t g) {
  const std::int64_t heads = std::int64_t{a.evidence.kv_heads} * a.evidence.group,
                     head = std::int64_t{row.head} * a.evidence.group + g;
  auto* base = static_cast<std::byte*>(const_cast<void*>(a.projections[row.layer]));
  return {base + head * a.value_dim * static_cast<std::int64_t>(sizeof(W)),
          heads * a.value_dim * static_cast<std::int64_t>(sizeof(W)),
          a.value_dim * static_cast<std::int64_t>(sizeof(W))};
}

__device__ inline float value_scale(const CriticalArguments& a, const Row& row, std::int64_t slot) {
  return is_8bit(a.values) ? *reinterpret_cast<const float*>(row.value_scales.at(slot)) : 1.0F;
}

/// Stages values as S, whatever they are stored as.
template <class S>
__device__ void stage_values(const CriticalTask& task, const Row& row, std::int32_t begin, std::int32_t rows, S* to,
                             std::int32_t stride) {
  const bool aligned = is_aligned(row.values);
  const auto plain = [](std::int32_t) { return 1.0F; };
  const std::int32_t dim = task.a.value_dim;
  const Element element = task.a.values;
  const auto stage = [&](auto type) {
    stage_as<decltype(type), S>(row.values, aligned, begin, row.length, rows, dim, task.padded, element, to, stride,
                                plain);
  };
  switch (element) {
    case Element::f16:
      if constexpr (!std::is_same_v<S, __nv_bfloat16>) stage(__half{});
      return;
    case Element::bf16:
      if constexpr (!std::is_same_v<S, __half>) stage(__nv_bfloat16{});
      return;
    case Element::f32:
      if constexpr (std::is_same_v<S, float>) stage(float{});
      return;
    default:  // 8 bits: all exact as f16 and as bf16
      stage(Bits8{});
  }
}

// In f32: see panel.cuh.

struct CriticalF32Shared {
  std::size_t values, panel, bytes;
  std::int32_t stride;  ///< of a value, in floats

  KVKEEP_HD explicit CriticalF32Shared(std::int32_t padded) : stride(padded + 4) {
    Parts parts;
    values = parts.take(sizeof(float) * kPanelSlots * static_cast<std::size_t>(stride));
    panel = parts.take(sizeof(float) * kPanelRows * kPanelStride);
    bytes = parts.bytes;
  }
};

template <class W>
__global__ void __launch_bounds__(kPanelThreads, 4) critical_f32_kernel(CriticalTask task) {
  wait_for_earlier_kernels();
  const CriticalF32Shared parts(task.padded);
  auto* values = reinterpret_cast<float*>(dynamic_shared() + parts.values);
  auto* panel = reinterpret_cast<float*>(dynamic_shared() + parts.panel);
  const CriticalArguments& a = task.a;
  const PanelPlace place;
  each_cut_chunk(task, kPanelSlots, [&](const Row& row, std::int32_t begin) {
    __syncthreads();
    stage_values(task, row, begin, kPanelSlots, values, parts.stride);
    float sums[4] = {};
    for (std::int32_t g = 0; g < a.evidence.group; ++g) {
      const SlotAddress weights = weights_of<W>(a, row, g);
      for (std::int32_t from = 0; from < a.hidden; from += kPanelRows) {
        const auto load = [&](std::int32_t n, std::int32_t d) {
          float4 x{0, 0, 0, 0};
          if (from + n >= a.hidden) return x;
          const W* w = reinterpret_cast<const W*>(weights.at(from + n)) + d;
          const std::int32_t left = a.value_dim - d;
          if (left > 0) x.x = to_float(w[0]);
          if (left > 1) x.y = to_float(w[1]);
          if (left > 2) x.z = to_float(w[2]);
          if (left > 3) x.w = to_float(w[3]);
          return x;
        };
        float products[16];
        multiply_panel(load, 0, task.padded, values, parts.stride, place, panel, products);
#pragma unroll
        for (int k = 0; k < 16; ++k) sums[k / 4] += fabsf(products[k]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float sum = sum_of_rows(sums[i]);
      const std::int32_t t = begin + place.slot0 + 4 * i;
      if (place.row0 == 0 && t < row.length)
        task.sizes[row.first + t] = sum / static_cast<float>(a.evidence.group) * fabsf(value_scale(a, row, t));
    }
  });
}

// On matrix units: a warp has 32 slots, and multiplies them with 32 hidden units at a time.

static_assert(kCriticalThreads == kPanelThreads);
constexpr std::int32_t kUnitSlots = kCriticalThreads, kScratchStride = 20;

template <class S>
struct CriticalMatrixShared {
  std::size_t values, weights, scratch, bytes;
  std::int32_t stride;  ///< of a value or hidden unit, in elements

  KVKEEP_HD explicit CriticalMatrixShared(std::int32_t padded) : stride(padded + 8) {
    Parts parts;
    values = parts.take(sizeof(S) * kUnitSlots * static_cast<std::size_t>(stride));
    weights = parts.take(sizeof(S) * kCriticalHidden * static_cast<std::size_t>(stride));
    scratch = parts.take(sizeof(float) * kCriticalThreads / 32 * 16 * kScratchStride);
    bytes = parts.bytes;
  }
};

template <class S>
__global__ void __launch_bounds__(kCriticalThreads, 4) critical_matrix_kernel(CriticalTask task) {
  wait_for_earlier_kernels();
  using Left = wmma::fragment<wmma::matrix_a, 16, 16, 16, S, wmma::row_major>;
  using Right = wmma::fragment<wmma::matrix_b, 16, 16, 16, S, wmma::col_major>;
  using Product = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;
  const CriticalMatrixShared<S> parts(task.padded);
  auto* values = reinterpret_cast<S*>(dynamic_shared() + parts.values);
  auto* staged = reinterpret_cast<S*>(dynamic_shared() + parts.weights);
  const CriticalArguments& a = task.a;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t lane = thread % 32, first = thread / 32 * 32;  // first: of the warp's slots
  float* scratch = reinterpret_cast<float*>(dynamic_shared() + parts.scratch) + first / 2 * kScratchStride;
  each_cut_chunk(task, kUnitSlots, [&](const Row& row, std::int32_t begin) {
    __syncthreads();
    stage_values(task, row, begin, kUnitSlots, values, parts.stride);
    const bool live = begin + first < row.length;  // the same for a whole warp
    const S* own = values + first * parts.stride;
    Product sizes[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) wmma::fill_fragment(sizes[i], 0.0F);
    for (std::int32_t g = 0; g < a.evidence.group; ++g) {
      const SlotAddress weights = weights_of<S>(a, row, g);
      const bool aligned = is_aligned(weights);
      for (std::int32_t from = 0; from < a.hidden; from += kCriticalHidden) {
        __syncthreads();
        stage_as<S, S>(weights, aligned, from, a.hidden, kCriticalHidden, a.value_dim, task.padded, a.projection,
                       staged, parts.stride, [](std::int32_t) { return 1.0F; });
        __syncthreads();
        if (!live) continue;
        Product product[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < 2; ++j) wmma::fill_fragment(product[i][j], 0.0F);
        for (std::int32_t d = 0; d < task.padded; d += 16) {
          Left left[2];
          Right right[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            wmma::load_matrix_sync(left[i], own + i * 16 * parts.stride + d, static_cast<unsigned>(parts.stride));
            wmma::load_matrix_sync(right[i], staged + i * 16 * parts.stride + d, static_cast<unsigned>(parts.stride));
          }
#pragma unroll
          for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) wmma::mma_sync(product[i][j], left[i], right[j], product[i][j]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int k = 0; k < Product::num_elements; ++k) sizes[i].x[k] += fabsf(product[i][j].x[k]);
      }
    }
    if (!live) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // half a row per lane
      __syncwarp();
      wmma::store_matrix_sync(scratch, sizes[i], kScratchStride, wmma::mem_row_major);
      __syncwarp();
      float sum = 0;
#pragma unroll
      for (int k = 0; k < 8; ++k) sum += scratch[lane / 2 * kScratchStride + lane % 2 * 8 + k];
      sum += __shfl_xor_sync(kWholeWarp, sum, 1);
      const std::int32_t t = begin + first + i * 16 + lane / 2;
      if (lane % 2 == 0 && t < row.length)
        task.sizes[row.first + t] = sum / static_cast<float>(a.evidence.group) * fabsf(value_scale(a, row, t));
    }
  });
}

// Two blocks: for three, ptxas would spill on sm_80.
__global__ void __launch_bounds__(tuning::kMostThreads, 2) critical_kernel(CriticalTask task) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(unsigned long long, scratch, kBlockScratch);
  KVKEEP_SHARED(std::int32_t, histogram, kDigits);
  const BlockTeam team(scratch);
  const CriticalArguments& a = task.a;
  for (std::int64_t r = blockIdx.x; r < a.evidence.count; r += gridDim.x) {
    const Row& row = a.evidence.rows[r];
    const Protected guarded = a.evidence.limits[r].guarded;
    std::int32_t* slots = a.slots + a.indptr[r];
    if (!is_cut(a, r)) {
      write_all(team, row.length, slots);
      continue;
    }
    const std::int32_t budget = kept_of(a, r);
    const std::int32_t share = share_of(a.first_stage, budget),
                       first = share > guarded.count() ? share : guarded.count();
    const float *scores = a.scores + row.first, *sizes = task.sizes + row.first;
    const auto by_score = [&](std::int32_t t) { return guarded.holds(t, row.length) ? 0 : rank_key(scores[t], t); };
    const std::uint64_t least = first > guarded.count()
                                    ? least_kept(team, histogram, 0, row.length, first - guarded.count(), by_score)
                                    : ~std::uint64_t{0};
    const auto by_size = [&](std::int32_t t) -> std::uint64_t {
      if (guarded.holds(t, row.length) || by_score(t) >= least) return 0;
      const float rank = (scores[t] + kEpsilon) * sizes[t];
      return rank_key(is_number(sizes[t]) ? rank : sizes[t] - sizes[t], t);  // NaN ranks last
    };
    const std::uint64_t least_of_rest =
        budget > first ? least_kept(team, histogram, 0, row.length, budget - first, by_size) : ~std::uint64_t{0};
    write_kept(
        team, row.length,
        [&](std::int32_t t) {
          return guarded.holds(t, row.length) || by_score(t) >= least || by_size(t) >= least_of_rest;
        },
        slots);
  }
}

}  // namespace

std::int64_t critical_workspace_bytes(const CriticalArguments& arguments) {
  return arguments.slots_in_all * static_cast<std::int64_t>(sizeof(float));
}

void launch_critical(const CriticalArguments& a, Stream stream) {
  require_aligned("critical", a.workspace);
  check_dim("critical: values", a.value_dim);
  check_wide("critical", "output projections", a.projection);
  KVKEEP_REQUIRE(a.first_stage >= 0 && a.first_stage <= 1, "critical: first_stage; given ", a.first_stage,
                 "; allowed 0 to 1");
  if (a.evidence.count == 0 || a.evidence.longest == 0) return;
  CriticalTask task{a, static_cast<float*>(a.workspace), (a.value_dim + 15) / 16 * 16, 0};
  const bool unit = a.matrix_unit && a.projection != Element::f32 && (a.values == a.projection || is_8bit(a.values));
  const auto measure = [&](const char* name, void (*kernel)(CriticalTask), std::int32_t slots, std::size_t shared) {
    task.chunks = (a.evidence.longest + slots - 1) / slots;
    launch(name, kernel,
           {.blocks = blocks_for(std::int64_t{a.evidence.count} * task.chunks),
            .threads = kCriticalThreads,
            .shared_bytes = shared},
           stream, task);
  };
  with_wide_element(a.projection, [&](auto type) {
    using W = decltype(type);
    if constexpr (!std::is_same_v<W, float>)
      if (unit)
        return measure("critical_matrix", critical_matrix_kernel<W>, kUnitSlots,
                       CriticalMatrixShared<W>(task.padded).bytes);
    measure("critical_f32", critical_f32_kernel<W>, kPanelSlots, CriticalF32Shared(task.padded).bytes);
  });
  launch("critical", critical_kernel,
         {.blocks = blocks_for(a.evidence.count), .threads = tuning::threads_for(a.evidence.longest)}, stream, task);
}

}  // namespace kvkeep::cuda
