// Vectorised for the machine it runs on: compiled once per instruction set, chosen at run time.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "memory_lanes.cpp"
#include <hwy/foreach_target.h>  // must come before highway.h
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "exponential-inl.h"
#include "memory_lanes.h"

HWY_BEFORE_NAMESPACE();
namespace kvkeep::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<float>;

using V = hn::Vec<D>;
constexpr std::int64_t kLanes = hn::MaxLanes(D());
constexpr std::int64_t kSketchBlock = 16;  ///< KeySketch::kBlock

HWY_INLINE float Sum(V v) { return hn::GetLane(hn::SumOfLanes(D(), v)); }

/// The last numbers of a row, `fill` behind them.
HWY_INLINE V First(const float* from, std::int64_t n, float fill = 0) {
  HWY_ALIGN float padded[kLanes];
  std::fill(padded + n, padded + kLanes, fill);
  std::memcpy(padded, from, static_cast<std::size_t>(n) * sizeof(float));
  return hn::Load(D(), padded);
}

HWY_INLINE void StoreFirst(V v, std::int64_t n, float* to) {
  HWY_ALIGN float padded[kLanes];
  hn::Store(v, D(), padded);
  std::memcpy(to, padded, static_cast<std::size_t>(n) * sizeof(float));
}

/// `kRows` rows at a time: a vector of x is loaded once for all of them.
template <int kRows>
HWY_INLINE void DotsOf(const float* HWY_RESTRICT rows, std::int64_t dim, const float* HWY_RESTRICT x, float* HWY_RESTRICT out) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  V sums[kRows];
  for (int r = 0; r < kRows; ++r) sums[r] = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + lanes <= dim; i += lanes) {
    const V v = hn::LoadU(d, x + i);
    for (int r = 0; r < kRows; ++r) sums[r] = hn::MulAdd(hn::LoadU(d, rows + r * dim + i), v, sums[r]);
  }
  if (i < dim) {
    const V v = First(x + i, dim - i);
    for (int r = 0; r < kRows; ++r) sums[r] = hn::MulAdd(First(rows + r * dim + i, dim - i), v, sums[r]);
  }
  for (int r = 0; r < kRows; ++r) out[r] = Sum(sums[r]);
}

void RowDots(const float* HWY_RESTRICT rows, std::int64_t count, std::int64_t dim, const float* HWY_RESTRICT x, float* HWY_RESTRICT out) {
  std::int64_t i = 0;
  for (; i + 4 <= count; i += 4) DotsOf<4>(rows + i * dim, dim, x, out + i);
  for (; i < count; ++i) DotsOf<1>(rows + i * dim, dim, x, out + i);
}

void AddRows(const float* HWY_RESTRICT rows, std::int64_t count, std::int64_t dim, const float* HWY_RESTRICT weights, float* HWY_RESTRICT out) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t j = 0;
  for (; j + 2 * lanes <= dim; j += 2 * lanes) {
    auto a = hn::LoadU(d, out + j), b = hn::LoadU(d, out + j + lanes);
    for (std::int64_t i = 0; i < count; ++i) {
      const auto w = hn::Set(d, weights[i]);
      a = hn::MulAdd(hn::LoadU(d, rows + i * dim + j), w, a);
      b = hn::MulAdd(hn::LoadU(d, rows + i * dim + j + lanes), w, b);
    }
    hn::StoreU(a, d, out + j);
    hn::StoreU(b, d, out + j + lanes);
  }
  for (; j < dim; j += lanes) {
    const std::int64_t width = std::min(lanes, dim - j);
    V a = First(out + j, width);
    for (std::int64_t i = 0; i < count; ++i) a = hn::MulAdd(First(rows + i * dim + j, width), hn::Set(d, weights[i]), a);
    StoreFirst(a, width, out + j);
  }
}

float Largest(const float* HWY_RESTRICT x, std::int64_t n) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  const auto number = [&](auto v) { return hn::IfThenElse(hn::IsNaN(v), lowest, v); };
  auto top = lowest;
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) top = hn::Max(top, number(hn::LoadU(d, x + i)));
  float most = hn::GetLane(hn::MaxOfLanes(d, top));
  for (; i < n; ++i)
    if (x[i] > most) most = x[i];
  return most;
}

float Exponentials(float* HWY_RESTRICT x, std::int64_t n, float top) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const auto above = hn::Set(d, top);
  auto sum = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const V e = ExpOfNegative(d, hn::Sub(hn::LoadU(d, x + i), above));
    hn::StoreU(e, d, x + i);
    sum = hn::Add(sum, e);
  }
  if (i < n) {
    const V e = ExpOfNegative(d, hn::Sub(First(x + i, n - i, -std::numeric_limits<float>::infinity()), above));
    StoreFirst(e, n - i, x + i);
    sum = hn::Add(sum, e);
  }
  return Sum(sum);
}

/// The entry of a table of 16 that each lane asks for.
HWY_INLINE V FromTable(const float* table, hn::Vec<hn::RebindToSigned<D>> index) {
#if HWY_TARGET <= HWY_AVX3
  return hn::TableLookupLanes(hn::LoadU(D(), table), hn::IndicesFromVec(D(), index));
#else
  return hn::GatherIndex(D(), table, index);
#endif
}

/// One block of tokens, `kHeads` queries: x[h][t] = scale * size[t] * (signs of t . query of h). The signs are unpacked once for all of them.
template <int kHeads>
HWY_INLINE void SketchBlock(const SketchedSpans& sketch, std::int64_t block, const float* HWY_RESTRICT tables, std::int64_t table_size, float scale, std::int64_t stride, float* HWY_RESTRICT x) {
  const hn::RebindToSigned<D> di;
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<std::uint16_t, D> d16;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(D()));
  const auto four = hn::Set(du, 15U);
  for (std::int64_t lane = 0; lane < kSketchBlock; lane += lanes) {
    V sums[kHeads];
    for (int h = 0; h < kHeads; ++h) sums[h] = hn::Zero(D());
    for (std::int64_t w = 0; w < sketch.words; ++w) {
      auto bits = hn::LoadU(du, sketch.signs + (block * sketch.words + w) * kSketchBlock + lane);
      const float* own = tables + w * 8 * 16;
      for (std::int64_t n = 0; n < 8; ++n) {
        const auto index = hn::BitCast(di, hn::And(bits, four));
        for (int h = 0; h < kHeads; ++h) sums[h] = hn::Add(sums[h], FromTable(own + h * table_size + n * 16, index));
        bits = hn::ShiftRight<4>(bits);
      }
    }
    const V size = hn::Mul(hn::Set(D(), scale), hn::BitCast(D(), hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, sketch.sizes + block * kSketchBlock + lane)))));
    for (int h = 0; h < kHeads; ++h) hn::StoreU(hn::Mul(sums[h], size), D(), x + h * stride + block * kSketchBlock + lane);
  }
}

void SketchSums(const SketchedSpans& sketch, const float* HWY_RESTRICT tables, const float* HWY_RESTRICT base, std::int64_t heads, float scale, float* HWY_RESTRICT x, float* HWY_RESTRICT tops, float* HWY_RESTRICT out) {
  constexpr float kNegligible = 30;
  const std::int64_t tokens = sketch.first[sketch.spans], blocks = (tokens + kSketchBlock - 1) / kSketchBlock, stride = blocks * kSketchBlock, table_size = sketch.words * 8 * 16;
  for (std::int64_t block = 0; block < blocks; ++block) {
    std::int64_t h = 0;
    for (; h + 4 <= heads; h += 4) SketchBlock<4>(sketch, block, tables + h * table_size, table_size, scale, stride, x + h * stride);
    for (; h < heads; ++h) SketchBlock<1>(sketch, block, tables + h * table_size, table_size, scale, stride, x + h * stride);
  }
  for (std::int64_t h = 0; h < heads; ++h) {
    const float* own_base = base + h * sketch.spans;
    float* sums = out + h * sketch.spans;
    float top = -std::numeric_limits<float>::infinity();
    for (std::int64_t s = 0; s < sketch.spans; ++s) {
      sums[s] = own_base[s] + Largest(x + h * stride + sketch.first[s], sketch.first[s + 1] - sketch.first[s]);
      top = std::max(top, sums[s]);
    }
    tops[h] = top;
    for (std::int64_t s = 0; s < sketch.spans; ++s)
      sums[s] = sums[s] < top - kNegligible ? 0 : Exponentials(x + h * stride + sketch.first[s], sketch.first[s + 1] - sketch.first[s], top - own_base[s]);
  }
}

bool AnyNan(const float* HWY_RESTRICT x, std::int64_t n) {
  const D d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const V v = hn::LoadU(d, x + i);
    if (!hn::AllTrue(d, hn::Eq(v, v))) return true;
  }
  for (; i < n; ++i)
    if (x[i] != x[i]) return true;
  return false;
}

}  // namespace kvkeep::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvkeep::cpu {

HWY_EXPORT(RowDots);
HWY_EXPORT(AddRows);
HWY_EXPORT(Largest);
HWY_EXPORT(SketchSums);
HWY_EXPORT(Exponentials);
HWY_EXPORT(AnyNan);

void row_dots(const float* rows, std::int64_t count, std::int64_t dim, const float* x, float* out) { HWY_DYNAMIC_DISPATCH(RowDots)(rows, count, dim, x, out); }
void add_rows(const float* rows, std::int64_t count, std::int64_t dim, const float* weights, float* out) { HWY_DYNAMIC_DISPATCH(AddRows)(rows, count, dim, weights, out); }
std::int64_t sketch_table_size(std::int64_t dim) { return (dim + 31) / 32 * 8 * 16; }
void sketch_table(const float* query, std::int64_t dim, float* table) {
  for (std::int64_t first = 0; first < (dim + 31) / 32 * 32; first += 4, table += 16)
    for (int pattern = 0; pattern < 16; ++pattern) {
      float sum = 0;
      for (int i = 0; i < 4; ++i)
        if (first + i < dim) sum += (pattern >> i & 1) != 0 ? query[first + i] : -query[first + i];
      table[pattern] = sum;
    }
}
void sketch_sums(const SketchedSpans& spans, const float* tables, const float* base, std::int64_t heads, float scale, float* x, float* top, float* out) {
  HWY_DYNAMIC_DISPATCH(SketchSums)(spans, tables, base, heads, scale, x, top, out);
}
float largest(const float* x, std::int64_t n) { return HWY_DYNAMIC_DISPATCH(Largest)(x, n); }
float exponentials(float* x, std::int64_t n, float top) { return HWY_DYNAMIC_DISPATCH(Exponentials)(x, n, top); }
void narrow(const float* from, std::int64_t n, ScalarType dtype, std::byte* to) {
  if (dtype == kFloat32) std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
  if (dtype == kFloat16) std::transform(from, from + n, reinterpret_cast<c10::Half*>(to), [](float x) { return static_cast<c10::Half>(x); });
  if (dtype == kBFloat16) std::transform(from, from + n, reinterpret_cast<c10::BFloat16*>(to), [](float x) { return static_cast<c10::BFloat16>(x); });
}
bool any_nan(const float* x, std::int64_t n) { return HWY_DYNAMIC_DISPATCH(AnyNan)(x, n); }

}  // namespace kvkeep::cpu
#endif
