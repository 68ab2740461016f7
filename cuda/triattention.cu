// SPDX-License-Identifier: Apache-2.0
#include "triattention.h"

#include <limits>

#include "element.cuh"
#include "launch.cuh"
#include "team.cuh"
#include "tuning.cuh"
#include "workspace.h"

namespace kvkeep::cuda {
namespace {

using tuning::kStandardThreads;
using tuning::kTriThreads;

constexpr float kLeast = -std::numeric_limits<float>::infinity();

struct TriAttentionTask {
  TriAttentionArguments a;
  double2* turns;    ///< [groups, offsets, F] exp(i w_f offset); for the mean one row: their mean
  float* trig;       ///< [count, G, offsets, 2, Fp]: real part, imaginary part
  float* norm;       ///< [count, G, Fp]
  float2* standard;  ///< [count, G] subtracted, then multiplied
  float* raw;        ///< [slots * G]: of a row [G, length]
  std::int32_t pairs, padded, offsets, chunks;

  [[nodiscard]] KVKEEP_HD std::int64_t groups() const { return a.evidence.count / a.evidence.kv_heads; }
  [[nodiscard]] __device__ double2* turns_of(std::int64_t group) const { return turns + group * offsets * pairs; }
  [[nodiscard]] __device__ float* raw_of(std::int64_t r) const {
    return raw + a.evidence.rows[r].first * a.evidence.group;
  }
};

__global__ void __launch_bounds__(kTriThreads) triattention_turns_kernel(TriAttentionTask task) {
  wait_for_earlier_kernels();
  for (std::int64_t group = blockIdx.x; group < task.groups(); group += gridDim.x) {
    double2* const turns = task.turns_of(group);
    const RopeView rope = task.a.evidence.ropes[group];
    for (auto f = static_cast<std::int32_t>(threadIdx.x); f < task.pairs; f += kTriThreads) {
      double2 sum{0, 0};
      std::int64_t offset = 1;
      for (std::int32_t o = 0; offset <= task.a.options.offset_max; offset *= 2, ++o) {
        const double angle = rope_angle(offset, rope.inv_freq[f]);
        const double2 turn{cos(angle), sin(angle)};
        sum = {sum.x + turn.x, sum.y + turn.y};
        if (task.a.options.aggregate == TriAttentionOptions::Aggregate::max)
          turns[o * task.pairs + f] = turn;
        else
          turns[f] = {sum.x / static_cast<double>(o + 1), sum.y / static_cast<double>(o + 1)};
      }
    }
  }
}

/// Columns of one query head of a row.
__global__ void __launch_bounds__(kTriThreads) triattention_columns_kernel(TriAttentionTask task) {
  wait_for_earlier_kernels();
  const EvidenceArguments& e = task.a.evidence;
  for (std::int64_t n = blockIdx.x; n < std::int64_t{e.count} * e.group; n += gridDim.x) {
    const std::int64_t r = n / e.group;
    if (!e.due(r)) continue;
    const Row& row = e.rows[r];
    const std::int64_t head =
        (std::int64_t{row.layer} * e.query_heads() + row.head * e.group + n - r * e.group) * task.pairs;
    const std::int64_t group = r / e.kv_heads;
    const std::int32_t position = task.a.next_positions[group];
    const RopeView rope = e.ropes[group];
    const double scaling = rope.attention_scaling;
    for (auto f = static_cast<std::int32_t>(threadIdx.x); f < task.padded; f += kTriThreads) {
      float* trig = task.trig + n * task.offsets * 2 * task.padded + f;
      if (f >= task.pairs) {
        task.norm[n * task.padded + f] = 0;
        for (std::int32_t o = 0; o < 2 * task.offsets; ++o) trig[o * task.padded] = 0;
        continue;
      }
      const double re = static_cast<double>(task.a.q_mean[2 * (head + f)]),
                   im = static_cast<double>(task.a.q_mean[2 * (head + f) + 1]);
      task.norm[n * task.padded + f] =
          static_cast<float>(scaling * (static_cast<double>(task.a.q_abs_mean[head + f]) - sqrt(re * re + im * im)));
      const double angle = rope_angle(position, rope.inv_freq[f]), c = cos(angle), s = sin(angle);
      const double x = scaling * re * c - scaling * im * s, y = scaling * re * s + scaling * im * c;
      for (std::int32_t o = 0; o < task.offsets; ++o) {
        const double2 later = task.turns_of(group)[o * task.pairs + f];
        trig[2 * o * task.padded] = static_cast<float>(x * later.x - y * later.y);
        trig[(2 * o + 1) * task.padded] = static_cast<float>(x * later.y + y * later.x);
      }
    }
  }
}

/// Four pairs of a key in shared memory; zeros after the last.
template <class T>
__device__ inline void load_pairs(const T* key, std::int32_t f, std::int32_t pairs, RopeStyle style, float scale,
                                  float* a, float* b) {
  if (pairs % 4 == 0) {
    const bool half = style == RopeStyle::half;
    const auto first = *reinterpret_cast<const PackedElements<T, 4>*>(key + (half ? f : 2 * f)),
               second = *reinterpret_cast<const PackedElements<T, 4>*>(key + (half ? f + pairs : 2 * f + 4));
    const float p[4] = {to_float(first.x[0]) * scale, to_float(first.x[1]) * scale, to_float(first.x[2]) * scale,
                        to_float(first.x[3]) * scale};
    const float q[4] = {to_float(second.x[0]) * scale, to_float(second.x[1]) * scale, to_float(second.x[2]) * scale,
                        to_float(second.x[3]) * scale};
    a[0] = p[0], a[1] = half ? p[1] : p[2], a[2] = half ? p[2] : q[0], a[3] = half ? p[3] : q[2];
    b[0] = half ? q[0] : p[1], b[1] = half ? q[1] : p[3], b[2] = half ? q[2] : q[1], b[3] = q[3];
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto [first, second] = rope_pair(style, f + i, pairs);
    a[i] = f + i < pairs ? to_float(key[first]) * scale : 0.0F;
    b[i] = f + i < pairs ? to_float(key[second]) * scale : 0.0F;
  }
}

/// |a + ib|; 0 below 1e-18.
__device__ inline float modulus(float a, float b) {
  const float square = fmaf(a, a, b * b);
  return square < 1e-36F ? 0.0F : sqrtf(square);
}

/// sums[c] += the products of one key with columns c of `count`, in one chain over the pairs: components with trig,
/// moduli with norm.
template <class T, int kColumns, bool kTrig, bool kNorm>
__device__ void multiply(const T* key, float scale, const TriAttentionTask& task, RopeStyle style, const float* trig,
                         std::int64_t next_trig, const float* norm, std::int32_t count, float* sums) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) sums[c] = 0;
  for (std::int32_t f = 0; f < task.pairs; f += 4) {
    float a[4], b[4];
    load_pairs(key, f, task.pairs, style, scale, a, b);
    float m[4] = {};
    if constexpr (kNorm) {
#pragma unroll
      for (int i = 0; i < 4; ++i) m[i] = modulus(a[i], b[i]);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (c >= count) break;
      if constexpr (kTrig) {
        const float4 x = *reinterpret_cast<const float4*>(trig + c * next_trig + f),
                     y = *reinterpret_cast<const float4*>(trig + c * next_trig + task.padded + f);
        sums[c] = fmaf(a[0], x.x, fmaf(a[1], x.y, fmaf(a[2], x.z, fmaf(a[3], x.w, sums[c]))));
        sums[c] = fmaf(b[0], y.x, fmaf(b[1], y.y, fmaf(b[2], y.z, fmaf(b[3], y.w, sums[c]))));
      }
      if constexpr (kNorm) {
        const float4 z = *reinterpret_cast<const float4*>(norm + c * task.padded + f);
        sums[c] = fmaf(m[0], z.x, fmaf(m[1], z.y, fmaf(m[2], z.z, fmaf(m[3], z.w, sums[c]))));
      }
    }
  }
}

/// Bytes from one key to the next in shared memory, where those of 8 bits are f16.
template <class T>
KVKEEP_HD std::int32_t staged(std::int32_t dim) {
  return (dim * static_cast<std::int32_t>(sizeof(MatrixElement<T>)) + 15) / 16 * 16 + 16;
}

constexpr int kAtOnce = 4;  ///< columns that share one read of the key

/// Raw scores of every query head: one thread per slot, whose key is in shared memory; all threads read the same
/// columns. Five blocks at a time: of its own accord ptxas gives 8-bit keys 64 registers on sm_80, which are too few.
template <class T>
__global__ void __launch_bounds__(kTriThreads, std::is_same_v<T, Bits8> ? 5 : 0)
    triattention_raw_kernel(TriAttentionTask task) {
  wait_for_earlier_kernels();
  using S = MatrixElement<T>;
  const EvidenceArguments& e = task.a.evidence;
  std::byte* keys = dynamic_shared();
  const std::int32_t stride = staged<T>(e.dim), tile = static_cast<std::int32_t>(blockDim.x),
                     thread = static_cast<std::int32_t>(threadIdx.x);
  for (std::int64_t work = blockIdx.x; work < std::int64_t{e.count} * task.chunks; work += gridDim.x) {
    const std::int64_t r = work / task.chunks;
    const std::int32_t begin = static_cast<std::int32_t>(work - r * task.chunks) * tile, length = e.rows[r].length;
    if (!e.due(r) || begin >= length) continue;
    const Row& row = e.rows[r];
    __syncthreads();
    const std::int32_t end = begin + tile < length ? begin + tile : length;
    if constexpr (std::is_same_v<T, S>)
      stage_keys<T>(row.keys, is_aligned(row.keys), begin, end, 0, e.dim, keys, stride);
    else
      stage_as<T, S>(row.keys, is_aligned(row.keys), begin, end, end - begin, e.dim, (e.dim + 7) / 8 * 8, e.keys,
                     reinterpret_cast<S*>(keys), stride / static_cast<std::int32_t>(sizeof(S)),
                     [](std::int32_t) { return 1.0F; });
    __syncthreads();
    const std::int32_t t = begin + thread;
    if (t >= length) continue;
    const S* key = reinterpret_cast<const S*>(keys + thread * stride);
    const float scale = key_scale<T>(row, t);
    const RopeStyle style = e.ropes[r / e.kv_heads].style;
    const std::int64_t next = std::int64_t{2} * task.padded;
    for (std::int32_t g = 0; g < e.group; g += kAtOnce) {
      const std::int32_t heads = e.group - g < kAtOnce ? e.group - g : kAtOnce;
      const float *trig = task.trig + (r * e.group + g) * task.offsets * next,
                  *norm = task.norm + (r * e.group + g) * task.padded;
      float sums[kAtOnce];
      if (task.offsets == 1) {
        multiply<S, kAtOnce, true, true>(key, scale, task, style, trig, next, norm, heads, sums);
      } else {
        multiply<S, kAtOnce, false, true>(key, scale, task, style, nullptr, 0, norm, heads, sums);
#pragma unroll
        for (int h = 0; h < kAtOnce; ++h) {
          if (h >= heads) break;
          float best = kLeast;
          for (std::int32_t o = 0; o < task.offsets; o += kAtOnce) {
            const std::int32_t count = task.offsets - o < kAtOnce ? task.offsets - o : kAtOnce;
            float found[kAtOnce];
            multiply<S, kAtOnce, true, false>(key, scale, task, style,
                                              trig + (std::int64_t{h} * task.offsets + o) * next, next, nullptr, count,
                                              found);
#pragma unroll
            for (int c = 0; c < kAtOnce; ++c)
              if (c < count && (found[c] > best || found[c] != found[c])) best = found[c];
          }
          sums[h] += best;
        }
      }
#pragma unroll
      for (int h = 0; h < kAtOnce; ++h)
        if (h < heads) task.raw_of(r)[std::int64_t{g + h} * length + t] = sums[h];
    }
  }
}

/// Finds what makes a query head's raw scores comparable: one block per query head of a row.
__global__ void __launch_bounds__(kStandardThreads) triattention_standard_kernel(TriAttentionTask task) {
  wait_for_earlier_kernels();
  KVKEEP_SHARED(double, shared, kStandardThreads / 32);
  const EvidenceArguments& e = task.a.evidence;
  for (std::int64_t n = blockIdx.x; n < std::int64_t{e.count} * e.group; n += gridDim.x) {
    const std::int64_t r = n / e.group;
    const std::int32_t length = e.rows[r].length;
    if (!e.due(r) || length == 0) continue;
    const bool sample = task.a.options.deviation == TriAttentionOptions::Deviation::sample;
    const Protected guarded = sample || e.limits == nullptr ? Protected{} : e.limits[r].guarded;
    const float* raw = task.raw_of(r) + (n - r * e.group) * length + guarded.sinks;
    const std::int32_t slots = length - guarded.sinks - guarded.recents;
    // One pass, in f64: sums of the distances from one of the numbers and of their squares lose nothing that f32 shows.
    const double near = slots > 0 && is_number(raw[0]) ? static_cast<double>(raw[0]) : 0;
    double sum = 0, count = 0, squares = 0;
    for (auto t = static_cast<std::int32_t>(threadIdx.x); t < slots; t += kStandardThreads) {
      if (!is_number(raw[t])) continue;
      const double x = static_cast<double>(raw[t]) - near;
      sum += x;
      squares += x * x;
      count += 1;
    }
    sum = sum_of_block<kStandardThreads>(sum, shared);
    count = sum_of_block<kStandardThreads>(count, shared);
    squares = sum_of_block<kStandardThreads>(squares, shared);
    if (threadIdx.x != 0) continue;
    const double mean = count > 0 ? sum / count : 0, around = squares - sum * mean;
    const TriAttention::Standard s = TriAttention::standard_of(count, near + mean, around > 0 ? around : 0, sample);
    task.standard[n] = {s.shift, s.factor};
  }
}

__global__ void __launch_bounds__(kTriThreads) triattention_combine_kernel(TriAttentionTask task, std::int32_t tile) {
  wait_for_earlier_kernels();
  const EvidenceArguments& e = task.a.evidence;
  for (std::int64_t work = blockIdx.x; work < std::int64_t{e.count} * task.chunks; work += gridDim.x) {
    const std::int64_t r = work / task.chunks;
    const std::int32_t length = e.rows[r].length, begin = static_cast<std::int32_t>(work - r * task.chunks) * tile,
                       t = begin + static_cast<std::int32_t>(threadIdx.x);
    if (!e.due(r) || static_cast<std::int32_t>(threadIdx.x) >= tile || t >= length) continue;
    const float* raw = task.raw_of(r) + t;
    float best = kLeast, sum = 0;
    for (std::int32_t g = 0; g < e.group; ++g) {
      const float2 s = task.a.options.normalize ? task.standard[r * e.group + g] : float2{0, 1};
      const float z = (raw[std::int64_t{g} * length] - s.x) * s.y;
      best = z > best ? z : best;
      sum += z;
    }
    task.a.scores[e.rows[r].first + t] = task.a.options.group == TriAttentionOptions::Group::mean
                                             ? sum * (1.0F / static_cast<float>(e.group))
                                         : sum != sum ? sum
                                                      : best;
  }
}

/// Slots per block: half as many if keys are large, so that they fit in the shared memory of every chip.
template <class T>
std::int32_t tile_of(std::int32_t dim) {
  return staged<T>(dim) > 600 ? kTriThreads / 2 : kTriThreads;
}

std::int32_t offsets_of(const TriAttentionArguments& a) {
  std::int32_t count = 0;
  for (std::int64_t offset = 1; offset <= a.options.offset_max && count < 62; offset *= 2) ++count;
  return a.options.aggregate == TriAttentionOptions::Aggregate::max ? count : 1;
}

/// Assigns the parts of the workspace. Returns its size.
std::int64_t divide(const TriAttentionArguments& a, TriAttentionTask& task) {
  task.a = a;
  task.pairs = a.evidence.dim / 2;
  task.padded = (task.pairs + 3) / 4 * 4;
  task.offsets = offsets_of(a);
  const std::int64_t heads = std::int64_t{a.evidence.count} * a.evidence.group;
  WorkspaceParts parts(a.workspace);
  task.turns = parts.take<double2>(task.groups() * task.offsets * task.pairs);
  task.trig = parts.take<float>(heads * task.offsets * 2 * task.padded);
  task.norm = parts.take<float>(heads * task.padded);
  task.standard = parts.take<float2>(heads);
  task.raw = parts.take<float>(a.slots * a.evidence.group);
  return parts.bytes();
}

}  // namespace

std::int64_t triattention_workspace_bytes(const TriAttentionArguments& arguments) {
  TriAttentionTask task{};
  return divide(arguments, task);
}

void launch_triattention(const TriAttentionArguments& a, Stream stream) {
  require_aligned("triattention", a.workspace);
  check_dim("triattention", a.evidence.dim);
  KVKEEP_REQUIRE(a.evidence.dim % 2 == 0, "triattention: head size; given ", a.evidence.dim, "; allowed even numbers");
  KVKEEP_REQUIRE(a.options.offset_max >= 1, "triattention: offset_max; given ", a.options.offset_max,
                 "; allowed 1 and more");
  if (a.evidence.count == 0 || a.evidence.longest == 0) return;
  KVKEEP_REQUIRE(a.evidence.ropes != nullptr,
                 "triattention: the rotation of keys is missing; allowed ropes of every group");
  TriAttentionTask task{};
  divide(a, task);
  const std::int64_t heads = std::int64_t{a.evidence.count} * a.evidence.group;
  with_element(a.evidence.keys, [&](auto type) {
    using T = decltype(type);
    const std::int32_t tile = tile_of<T>(a.evidence.dim);
    task.chunks = (a.evidence.longest + tile - 1) / tile;
    const dim3 blocks = blocks_for(std::int64_t{a.evidence.count} * task.chunks);
    launch("triattention_turns", triattention_turns_kernel,
           {.blocks = blocks_for(task.groups()), .threads = kTriThreads}, stream, task);
    launch("triattention_columns", triattention_columns_kernel, {.blocks = blocks_for(heads), .threads = kTriThreads},
           stream, task);
    launch("triattention_raw", triattention_raw_kernel<T>,
           {.blocks = blocks,
            .threads = tile,
            .shared_bytes = static_cast<std::size_t>(tile) * static_cast<std::size_t>(staged<T>(a.evidence.dim))},
           stream, task);
    if (a.options.normalize)
      launch("triattention_standard", triattention_standard_kernel,
             {.blocks = blocks_for(heads), .threads = kStandardThreads}, stream, task);
    launch("triattention_combine", triattention_combine_kernel, {.blocks = blocks, .threads = kTriThreads}, stream,
           task, tile);
  });
}

}  // namespace kvkeep::cuda
