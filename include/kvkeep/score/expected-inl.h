// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bodies of expected.h: compiled by src/score, or where they are included under KVKEEP_HEADER_ONLY.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "kvkeep/core/hd.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/score/expected.h"
#include "kvkeep/score/window_attention.h"
#include "kvkeep/simd/aligned.h"
#include "kvkeep/simd/expected_lanes.h"

namespace kvkeep {
namespace expected_detail {

using cpu::Aligned;

inline constexpr std::int64_t kPadding = 64;    ///< logits of a row are padded to a multiple of it
inline constexpr std::int32_t kAhead = 12;      ///< queries that are fetched ahead
inline constexpr std::int64_t kTiles = 16;      ///< tiles of keys that go through a head's panels together
inline constexpr std::int64_t kUnitKeys = 128;  ///< keys in a product of the matrix unit
inline constexpr std::int64_t kUnitDepth = 32;  ///< head sizes that the unit takes are multiples of it
inline constexpr std::int64_t kUnitMeans = 16;  ///< columns are padded to a multiple of it

inline std::int64_t round_up(std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; }

/// Mean of a layer's rotations at `count` positions from `first` on: [F] cos and sin, attention scaling included.
struct MeanTurn {
  const RopeSpec* rope;
  std::vector<double> cosines, sines;
  std::vector<float> cosines32, sines32;

  MeanTurn(const RopeSpec& of, std::int64_t first, std::int64_t count) : rope(&of) {
    for (const double w : of.inv_freq) {
      const RopeMeanTurn turn = rope_mean_turn(first, count, w, of.attention_scaling);
      cosines.push_back(turn.cosine);
      sines.push_back(turn.sine);
    }
    cosines32.assign(cosines.begin(), cosines.end());
    sines32.assign(sines.begin(), sines.end());
  }

  void turn(double* x) const {
    const auto pairs = static_cast<std::int64_t>(cosines.size());
    for (std::int64_t f = 0; f < pairs; ++f) {
      const auto [i, j] = rope_pair(rope->style, f, pairs);
      const auto k = static_cast<std::size_t>(f);
      const double a = x[i], b = x[j];
      x[i] = product(a, cosines[k]) - product(b, sines[k]);
      x[j] = product(b, cosines[k]) + product(a, sines[k]);
    }
  }
};

/// Queries minus their mean, divided by `scale`.
struct QueryBlock {
  Aligned<float> x;          ///< [rows, gram_stride(D)], followed by as much as gram() reads
  std::vector<double> mean;  ///< [D]
  std::vector<float> mean32;
  Aligned<float> products;  ///< [gram_rows(D), gram_stride(D)] upper triangle of the sum of x x^T
  double scale = 1;         ///< a power of two that keeps the squares inside fp32

  /// Room for `rows` queries of `dim` numbers.
  void reserve(std::int64_t rows, std::int64_t dim) {
    x.resize(static_cast<std::size_t>(rows * cpu::gram_stride(dim) + cpu::gram_rows(dim)));
    products.resize(static_cast<std::size_t>(cpu::gram_rows(dim) * cpu::gram_stride(dim)));
    mean.resize(static_cast<std::size_t>(dim));
    mean32.resize(mean.size());
  }
  [[nodiscard]] static std::int64_t bytes(std::int64_t rows, std::int64_t dim) {
    return 4 * (cpu::gram_stride(dim) * (rows + cpu::gram_rows(dim)) + cpu::gram_rows(dim)) + 12 * dim;
  }

  /// Subtracts the mean from `rows` rows of x. Throws InvalidArgument for numbers that are not finite, or too large for
  /// fp32 when centred.
  void centre(std::int64_t rows, std::int64_t dim, std::int32_t head) {
    const std::int64_t stride = cpu::gram_stride(dim);
    KVKEEP_REQUIRE(cpu::column_means(x.data(), rows, dim, stride, mean.data()), "expected: a query of head ", head,
                   " holds a number that is not finite; allowed finite numbers");
    std::copy(mean.begin(), mean.end(), mean32.begin());
    const float top = cpu::centre_rows(x.data(), rows, dim, stride, mean32.data());
    KVKEEP_REQUIRE(std::isfinite(top), "expected: queries of head ", head,
                   " are further apart than fp32 can represent; allowed below 1e38");
    int exponent = 0;
    if (top > 0 && (top <= 0x1p-20F || top >= 0x1p40F)) static_cast<void>(std::frexp(top, &exponent));
    scale = std::ldexp(1.0, exponent);
    for (int left = -exponent; left != 0;) {  // each factor fits a float
      const int step = std::clamp(left, -100, 100);
      left -= step;
      cpu::scale_rows(x.data(), rows, stride, std::ldexp(1.0F, step));
    }
  }
  /// Computes products from x.
  void multiply(std::int64_t rows, std::int64_t dim) { cpu::gram(x.data(), rows, dim, products.data()); }
};

/// cos and sin that undo RoPE, attention scaling included, on the queries of a view from `first` on.
inline cpu::Turns turns_back(const RopeSpec& rope, const QueryView& view, std::int32_t first) {
  cpu::Turns back{.rope = &rope};
  back.fill(view.count - first, [&](std::int32_t i) { return view.position(first + i); });
  const auto shrink = static_cast<float>(1.0 / (rope.attention_scaling * rope.attention_scaling));
  for (float& c : back.cosines) c *= shrink;
  for (float& s : back.sines) s *= -shrink;
  return back;
}

/// Queries of one group that count, by their place in the view, and how to turn them back.
struct Buffered {
  std::int32_t first = 0, count = 0;
  const cpu::Turns* back = nullptr;  ///< undoes RoPE on token `first` and later ones; null: they come before it
};

/// How one row is processed, and the floats that this takes.
struct Sizes {
  std::int64_t dim, group, length, queries;
  bool unit;
  std::int64_t width;         ///< columns of a panel
  std::int64_t panels;        ///< of one head
  std::int64_t panel_floats;  ///< room for all panels of one head, fp32
  std::int64_t keys;          ///< multiplied together
  std::int64_t depth;         ///< matrix unit: queries, padded

  Sizes(const ModelSpec& spec, std::int64_t slots, std::int64_t rows, bool matrix_unit)
      : dim(spec.key_dim), group(spec.group()), length(round_up(slots, kPadding)), queries(rows), unit(matrix_unit) {
    width = !unit ? cpu::column_width() : dim % (2 * kUnitDepth) == 0 ? 2 * kUnitDepth : kUnitDepth;
    panels = (dim + width - 1) / width;
    panel_floats = panels * width * dim;
    keys = unit ? kUnitKeys : kTiles * cpu::tile_keys();
    depth = unit ? round_up(rows, kUnitDepth) : 0;
  }
  [[nodiscard]] std::int64_t mean_width() const { return unit ? round_up(group, kUnitMeans) : round_up(group, width); }
  [[nodiscard]] std::int64_t lanes() const { return cpu::column_width() / 2; }
};

/// Buffers of one thread. bytes() and the constructor list the same buffers.
struct Workspace {
  QueryBlock block;
  Aligned<double> matrix;                             ///< [gram_rows(D), cholesky_stride(D)]
  Aligned<float> panel;                               ///< plain: [G, panel_floats]; matrix unit: one of [D, width]
  Aligned<std::uint16_t> pairs;                       ///< matrix unit: [G, 2 * panel_floats], high parts and low parts
  Aligned<std::uint16_t> query_pairs, query_columns;  ///< matrix unit: low parts and high parts [2, depth / 2, D, 2];
                                                      ///< high parts and low parts [D, 2, depth]
  Aligned<float> factors;                             ///< [G] multiplied with the sums
  Aligned<float> means;                               ///< [D, mean_width]
  Aligned<std::uint16_t> mean_pairs;
  Aligned<float> tiles;              ///< plain: keys, widened
  Aligned<std::uint16_t> unit_keys;  ///< matrix unit: [keys, 2 D]
  Aligned<float> products;           ///< [keys, columns]
  Aligned<float> linear;             ///< [keys, mean_width]
  Aligned<float> sums;               ///< [keys, lanes]
  Aligned<float> logits;             ///< [G, length]
  Aligned<float> widened;            ///< [max(D, Dv)]

  explicit Workspace(const Sizes& s, std::int32_t value_dim) {
    block.reserve(std::max(s.queries, s.depth), s.dim);
    each(s, value_dim,
         [&](auto Workspace::* member, std::int64_t n) { (this->*member).resize(static_cast<std::size_t>(n)); });
  }
  static std::int64_t bytes(const Sizes& s, std::int32_t value_dim) {
    std::int64_t sum = QueryBlock::bytes(std::max(s.queries, s.depth), s.dim);
    each(s, value_dim,
         [&]<class T>(Aligned<T> Workspace::*, std::int64_t n) { sum += n * static_cast<std::int64_t>(sizeof(T)); });
    return sum;
  }

 private:
  template <class Body>
  static void each(const Sizes& s, std::int32_t value_dim, Body&& body) {
    body(&Workspace::matrix, cpu::gram_rows(s.dim) * cpu::cholesky_stride(s.dim));
    body(&Workspace::panel, s.unit ? s.dim * s.width : s.group * s.panel_floats);
    body(&Workspace::pairs, s.unit ? 2 * s.group * s.panel_floats : 0);
    body(&Workspace::query_pairs, 2 * s.depth * s.dim);
    body(&Workspace::query_columns, 2 * s.depth * s.dim);
    body(&Workspace::factors, s.group);
    body(&Workspace::means, s.dim * s.mean_width());
    body(&Workspace::mean_pairs, s.unit ? 2 * s.dim * s.mean_width() : 0);
    body(&Workspace::tiles, s.unit ? 0 : s.keys * s.dim);
    body(&Workspace::unit_keys, s.unit ? 2 * s.keys * s.dim : 0);
    body(&Workspace::products, s.unit ? s.keys * s.width : 0);
    body(&Workspace::linear, s.keys * s.mean_width());
    body(&Workspace::sums, s.keys * s.lanes());
    body(&Workspace::logits, s.group * s.length);
    body(&Workspace::widened, std::max<std::int64_t>(s.dim, value_dim));
  }
};

/// One row while it is scored.
class RowScores {
 public:
  RowScores(const Evidence& evidence, const ExpectedOptions& options, const Sizes& sizes, const MeanTurn& turn,
            Workspace& work)
      : evidence_(evidence), spec_(evidence.spec), options_(options), sizes_(sizes), turn_(turn), work_(work) {}

  void run(const Row& row, const RowGroup& group, const Buffered& buffered, float* g) {
    sink_ = std::min(options_.sink, row.length);
    slots_ = row.length - sink_;
    rows_ = 0;
    bool spread = false;
    for (std::int32_t h = 0; h < spec_.group(); ++h) spread = prepare(row.head * spec_.group() + h, h, group, buffered);
    if (slots_ > 0) logits(row, spread);
    finish(row, g);
  }

 private:
  /// Turns mean and covariance of one query head into panels. False if there is no covariance.
  bool prepare(std::int32_t head, std::int32_t h, const RowGroup& group, const Buffered& buffered) {
    const double scale = spec_.scale();
    std::vector<double>& mean = work_.block.mean;
    double* a = work_.matrix.data();
    const std::int64_t dim = sizes_.dim, stride = cpu::cholesky_stride(dim), gram_stride = cpu::gram_stride(dim);
    gather(group.queries, buffered, head);
    work_.block.centre(buffered.count, dim, head);
    const bool spread = options_.covariance && buffered.count > 1;
    const double factor = work_.block.scale * scale / std::sqrt(2.0 * buffered.count);
    if (spread) turn_rows(buffered.count);
    if (spread &&
        buffered.count <= dim) {  // the queries are the factor: cheaper then, and exact if the covariance is singular
      rows_ = buffered.count;
      pack_queries(h, factor);
    } else if (spread && !sizes_.unit) {
      work_.block.multiply(buffered.count, dim);
      for (std::int64_t i = 0; i < dim; ++i)
        for (std::int64_t j = i; j < dim; ++j)
          a[i * stride + j] = static_cast<double>(work_.block.products[static_cast<std::size_t>(i * gram_stride + j)]);
    }
    turn_.turn(mean.data());
    for (std::int64_t d = 0; d < dim; ++d)
      work_.means[static_cast<std::size_t>(mean_place(d, h))] =
          static_cast<float>(mean[static_cast<std::size_t>(d)] * scale);
    work_.factors[static_cast<std::size_t>(h)] = 1;
    if (!spread || rows_ > 0) return spread;
    if (sizes_.unit) {
      pack_covariance(h, factor, buffered.count);
    } else {
      cpu::cholesky(a, dim);
      pack_factor(h, factor);
    }
    return true;
  }

  /// Where component d of head h's mean is stored: plain products take one panel after the other, the matrix unit all
  /// columns at once.
  [[nodiscard]] std::int64_t mean_place(std::int64_t d, std::int64_t h) const {
    const std::int64_t width = sizes_.unit ? sizes_.mean_width() : sizes_.width;
    return (h / width * sizes_.dim + d) * width + h % width;
  }

  void gather(const QueryView& view, const Buffered& buffered, std::int32_t head) {
    float* x = work_.block.x.data();
    const std::int64_t stride = cpu::gram_stride(sizes_.dim), bytes = sizes_.dim * element_size(view.dtype);
    for (std::int32_t i = 0; i < buffered.count; ++i, x += stride) {
      if (i + kAhead < buffered.count)  // tokens are far apart: fetched before they are read
        for (std::int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(view.at(buffered.first + i + kAhead, head) + b);
      cpu::widen(view.at(buffered.first + i, head), view.dtype, sizes_.dim, x);
      if (buffered.back != nullptr) buffered.back->apply(i, x);
    }
  }

  void turn_rows(std::int64_t rows) {
    const auto pairs = static_cast<std::int64_t>(turn_.cosines.size());
    float* x = work_.block.x.data();
    const std::int64_t stride = cpu::gram_stride(sizes_.dim);
    if (turn_.rope->style == RopeStyle::half) {
      cpu::turn_rows(x, rows, stride, pairs, turn_.cosines32.data(), turn_.sines32.data());
    } else {
      for (std::int64_t i = 0; i < rows; ++i)
        rope_rotate(turn_.rope->style, pairs, turn_.cosines32.data(), turn_.sines32.data(), x + i * stride);
    }
  }

  /// Packs the rows of the factor, which are the columns that keys are multiplied with, into the panels of head h.
  void pack_factor(std::int64_t h, double factor) {
    const std::int64_t dim = sizes_.dim, width = sizes_.width, stride = cpu::cholesky_stride(dim);
    float* panel = work_.panel.data() + h * sizes_.panel_floats;
    for (std::int64_t start = 0; start < dim; start += width) {
      const std::int64_t rows = dim - start;
      std::fill_n(panel, rows * width, 0.0F);
      for (std::int64_t c = 0; c < std::min(width, rows); ++c) {
        const double* u = work_.matrix.data() + (start + c) * stride + start;
        for (std::int64_t i = c; i < rows; ++i) panel[i * width + c] = static_cast<float>(u[i] * factor);
      }
      panel += rows * width;
    }
  }

  /// For the matrix unit, packs the covariance itself into the panels of head h: that of the `count` turned queries, or
  /// if `count` is 0 the one in the matrix. k^T C k takes C once on the panels' diagonal blocks and twice below them.
  /// `factor` is applied twice, now and to the sums: this reaches as far as the squares of a triangular factor.
  void pack_covariance(std::int64_t h, double factor, std::int64_t count) {
    const std::int64_t dim = sizes_.dim, width = sizes_.width, depth = round_up(count, kUnitDepth),
                       stride = cpu::gram_stride(dim);
    std::uint16_t *low = work_.query_pairs.data(), *high = low + depth * dim, *columns = work_.query_columns.data();
    if (count > 0) {
      std::fill(work_.block.x.data() + count * stride, work_.block.x.data() + depth * stride, 0.0F);
      cpu::split_pairs(work_.block.x.data(), stride, depth, dim, 1, high, low);
      cpu::transpose_pairs(high, depth, dim, columns, 2 * depth);
      cpu::transpose_pairs(low, depth, dim, columns + depth, 2 * depth);
    }
    float* panel = work_.panel.data();
    std::uint16_t* pairs = work_.pairs.data() + 2 * h * sizes_.panel_floats;
    const auto once = static_cast<float>(std::min(factor, 1e38));
    for (std::int64_t start = 0; start < dim; start += width) {
      const std::int64_t rows = dim - start;
      if (count > 0) {  // all products of high and low parts except low with low, which is rounding noise
        cpu::matrix_unit()->multiply_pairs(rows, width, 2 * depth, columns + start * 2 * depth, 2 * depth,
                                           low + 2 * start, dim, false, panel);
        cpu::matrix_unit()->multiply_pairs(rows, width, depth, columns + start * 2 * depth, 2 * depth, high + 2 * start,
                                           dim, true, panel);
      } else {
        for (std::int64_t i = 0; i < rows; ++i) {
          const double* c = work_.matrix.data() + (start + i) * cpu::cholesky_stride(dim) + start;
          std::transform(c, c + width, panel + i * width, [](double x) { return static_cast<float>(x); });
        }
      }
      split(panel, rows, once, 2 * once, pairs);
      pairs += 2 * rows * width;
    }
    work_.factors[static_cast<std::size_t>(h)] = once;
  }

  /// The centred queries themselves as columns.
  void pack_queries(std::int64_t h, double factor) {
    const std::int64_t dim = sizes_.dim, width = sizes_.width, stride = cpu::gram_stride(dim);
    float* panel = work_.panel.data() + (sizes_.unit ? 0 : h * sizes_.panel_floats);
    std::uint16_t* pairs = work_.pairs.data() + (sizes_.unit ? 2 * h * sizes_.panel_floats : 0);
    const auto small = static_cast<float>(factor);
    for (std::int64_t first = 0; first < rows_; first += width) {
      std::fill_n(panel, dim * width, 0.0F);
      for (std::int64_t c = 0; c < std::min(width, rows_ - first); ++c) {
        const float* x = work_.block.x.data() + (first + c) * stride;
        for (std::int64_t i = 0; i < dim; ++i) panel[i * width + c] = x[i] * small;
      }
      if (sizes_.unit) {
        split(panel, dim, 1, 1, pairs);
        pairs += 2 * dim * width;
      } else {
        panel += dim * width;
      }
    }
  }

  /// A panel in two parts, the pieces of the low part from last to first; scales the first piece by `first`, the others
  /// by `others`.
  void split(const float* panel, std::int64_t rows, float first, float others, std::uint16_t* pairs) const {
    const std::int64_t width = sizes_.width;
    for (std::int64_t i = 0; i < rows; i += width)
      cpu::split_pairs(panel + i * width, width, width, width, i == 0 ? first : others, pairs + i * width,
                       pairs + (rows + (rows - width - i)) * width);
  }

  /// Calls body(first component that is not zero) for every panel of a head, in order.
  template <class Body>
  void each_panel(Body&& body) const {
    for (std::int64_t first = 0; first < (rows_ > 0 ? rows_ : sizes_.dim); first += sizes_.width)
      body(rows_ > 0 ? 0 : first);
  }

  /// Logits of every slot from the sinks on, [G][slots].
  void logits(const Row& row, bool spread) {
    const cpu::Keys keys{row.keys, evidence_.table.key_dtype, spec_.key_dim};
    if (sizes_.unit)
      for (std::int64_t i = 0; i < sizes_.dim; i += sizes_.width)
        cpu::split_pairs(work_.means.data() + i * sizes_.mean_width(), sizes_.mean_width(), sizes_.width,
                         sizes_.mean_width(), 1, work_.mean_pairs.data() + i * sizes_.mean_width(),
                         work_.mean_pairs.data() + (2 * sizes_.dim - sizes_.width - i) * sizes_.mean_width());
    for (std::int64_t from = 0; from < slots_; from += sizes_.keys) {
      const std::int64_t count = std::min(sizes_.keys, slots_ - from);
      if (sizes_.unit)
        unit_block(keys, from, count, spread);
      else
        plain_block(keys, from, count, spread);
    }
    for (std::int64_t h = 0; h < sizes_.group; ++h)
      std::fill(row_logits(h) + slots_, row_logits(h) + round_up(slots_, kPadding),
                -std::numeric_limits<float>::infinity());
  }

  void plain_block(const cpu::Keys& keys, std::int64_t from, std::int64_t count, bool spread) {
    const std::int64_t dim = sizes_.dim, width = sizes_.width,
                       tiles = (count + cpu::tile_keys() - 1) / cpu::tile_keys();
    cpu::pack_tiles(keys, sink_ + from, sink_ + from + count, work_.tiles.data(), work_.widened.data());
    for (std::int64_t first = 0; first < sizes_.group; first += width)
      cpu::tile_products(work_.tiles.data(), tiles, dim, work_.means.data() + first * dim,
                         work_.linear.data() + first * sizes_.keys);
    for (std::int64_t h = 0; h < sizes_.group; ++h) {
      std::fill(work_.sums.begin(), work_.sums.end(), 0.0F);
      const float* panel = work_.panel.data() + h * sizes_.panel_floats;
      if (spread)
        each_panel([&](std::int64_t start) {
          cpu::add_squares(work_.tiles.data(), tiles, dim, panel, start, rows_ == 0, work_.sums.data());
          panel += (dim - start) * width;
        });
      cpu::expected_logits(work_.sums.data(), count, work_.factors[static_cast<std::size_t>(h)],
                           work_.linear.data() + h / width * width * sizes_.keys + h % width, width,
                           row_logits(h) + from);
    }
  }

  void unit_block(const cpu::Keys& keys, std::int64_t from, std::int64_t count, bool spread) {
    const std::int64_t dim = sizes_.dim, width = sizes_.width, means = sizes_.mean_width();
    // Each key twice: as it is, for the high parts; then its pieces from last to first, for the low parts. The
    // components from any piece on are contiguous.
    for (std::int64_t t = 0; t < sizes_.keys; ++t) {
      std::uint16_t* to = work_.unit_keys.data() + t * 2 * dim;
      if (t >= count) {
        std::fill_n(to, 2 * dim, std::uint16_t{0});
        continue;
      }
      const std::byte* key = keys.slots.at(sink_ + from + t);
      std::memcpy(to, key, static_cast<std::size_t>(dim) * 2);
      for (std::int64_t i = 0; i < dim; i += width)
        std::memcpy(to + 2 * dim - width - i, to + i, static_cast<std::size_t>(width) * 2);
    }
    cpu::matrix_unit()->multiply_pairs(sizes_.keys, means, 2 * dim, work_.unit_keys.data(), 2 * dim,
                                       work_.mean_pairs.data(), means, false, work_.linear.data());
    for (std::int64_t h = 0; h < sizes_.group; ++h) {
      std::fill(work_.sums.begin(), work_.sums.end(), 0.0F);
      const std::uint16_t* pairs = work_.pairs.data() + 2 * h * sizes_.panel_floats;
      if (spread)
        each_panel([&](std::int64_t start) {
          cpu::matrix_unit()->multiply_pairs(sizes_.keys, width, 2 * (dim - start), work_.unit_keys.data() + start,
                                             2 * dim, pairs, width, false, work_.products.data());
          if (rows_ > 0)
            cpu::add_product_squares(work_.products.data(), count, width, work_.sums.data());
          else
            cpu::add_key_products(work_.products.data(), work_.unit_keys.data() + start, 2 * dim, count, width,
                                  work_.sums.data());
          pairs += 2 * (dim - start) * width;
        });
      cpu::expected_logits(work_.sums.data(), count, work_.factors[static_cast<std::size_t>(h)],
                           work_.linear.data() + h, means, row_logits(h) + from);
    }
  }

  /// Softmax per query head, mean over the group, value norm with epsilon, sinks.
  void finish(const Row& row, float* g) {
    if (slots_ == 0) return std::iota(g, g + row.length, 0.0F);
    float* out = g + sink_;
    std::fill_n(out, slots_, 0.0F);
    const float* sinks = spec_.sinks_of(row.layer, row.head);
    for (std::int64_t h = 0; h < sizes_.group; ++h) {
      float* x = row_logits(h);
      const float sink = sinks == nullptr ? -std::numeric_limits<float>::infinity() : sinks[h],
                  top = std::max(cpu::row_top(x, slots_), sink),
                  sum =
                      cpu::row_exp(x, round_up(slots_, kPadding), top) + (sinks == nullptr ? 0 : std::exp(sink - top));
      cpu::add_scaled(out, x, sum > 0 ? 1.0F / (sum * static_cast<float>(sizes_.group)) : 0.0F, slots_);
    }
    if (options_.value_norm) {
      const auto epsilon = static_cast<float>(options_.epsilon);
      float* norms = row_logits(0);
      cpu::vector_norms({row.values, evidence_.table.value_dtype, spec_.value_dim}, sink_, row.length, norms,
                        work_.widened.data());
      for (std::int32_t t = 0; t < slots_; ++t) out[t] = (out[t] + epsilon) * norms[t];
    }
    std::fill_n(g, sink_, cpu::row_top(out, slots_));
  }

  [[nodiscard]] float* row_logits(std::int64_t h) { return work_.logits.data() + h * sizes_.length; }

  const Evidence& evidence_;
  const ModelSpec& spec_;
  const ExpectedOptions& options_;
  const Sizes& sizes_;
  const MeanTurn& turn_;
  Workspace& work_;
  std::int32_t sink_ = 0, slots_ = 0;
  std::int64_t rows_ = 0;  ///< queries that are the factor themselves; 0: a triangular factor
};

}  // namespace expected_detail

KVKEEP_INLINE Needs Expected::needs() const {
  return {.queries = options_.queries, .keys = true, .values = options_.value_norm, .rope = true};
}

KVKEEP_INLINE std::int64_t Expected::workspace_bytes(const ModelSpec& spec, std::int64_t length, std::int64_t queries) {
  const auto bytes = [&](bool unit) {
    return expected_detail::Workspace::bytes(expected_detail::Sizes(spec, length, queries, unit), spec.value_dim);
  };
  return spec.key_dim % expected_detail::kUnitDepth == 0 ? std::max(bytes(false), bytes(true)) : bytes(false);
}

KVKEEP_INLINE Scores Expected::score(const Evidence& evidence, const Limits& limits, const WindowAttention&) const {
  require_host("expected", evidence.table.device);
  for (const std::string& problem : problems(evidence.spec)) refuse<Unsupported>(problem);
  const RowTable& table = evidence.table;
  const ModelSpec& spec = evidence.spec;
  for (const Dtype dtype : {table.key_dtype, options_.value_norm ? table.value_dtype : table.key_dtype})
    KVKEEP_REQUIRE(is_scorable(dtype), "expected: keys or values are ", dtype,
                   "; allowed f32, f16, bf16 (other dtypes can be moved, not scored)");
  const bool unit = options_.matrix_unit && table.key_dtype == Dtype::bf16 &&
                    spec.key_dim % expected_detail::kUnitDepth == 0 && cpu::matrix_unit() != nullptr;
  Scores scores{empty({table.slots}, Dtype::f32)};
  float* out = scores.data.data<float>();

  std::vector<expected_detail::Buffered> buffered(table.groups.size());
  std::vector<cpu::Turns> backs(table.groups.size());
  std::vector<expected_detail::MeanTurn> turns;
  turns.reserve(table.groups.size());
  std::vector<std::size_t> turn_of(table.groups.size());
  std::int64_t most = 0;
  for (std::size_t i = 0; i < table.groups.size(); ++i) {
    const RowGroup& group = table.groups[i];
    const QueryView& view = group.queries;
    expected_detail::Buffered& b = buffered[i];
    b.first = std::max(0, view.count - options_.queries);
    while (b.first < view.count && view.position(b.first) < options_.sink) ++b.first;
    b.count = view.count - b.first;
    most = std::max<std::int64_t>(most, b.count);
    const RopeSpec& rope = spec.rope_of(group.layer);
    KVKEEP_REQUIRE(rope.stated(), "expected: the model spec does not state the RoPE of layer ", group.layer,
                   "; allowed rope.inv_freq, or RopeStyle::none for a layer that has none");
    std::size_t twin = i;  // the layers of a sequence mostly see the same positions, and turn alike
    for (std::size_t e = 0; e < i && twin == i; ++e)
      if (table.groups[e].sequence == group.sequence && table.groups[e].next_position == group.next_position &&
          &spec.rope_of(table.groups[e].layer) == &rope && cpu::same_positions(table.groups[e].queries, view))
        twin = e;
    turn_of[i] = twin == i ? turns.size() : turn_of[twin];
    if (twin == i) turns.emplace_back(rope, group.next_position, options_.future);
    if (b.count > 0 && evidence.basis == QueryBasis::post_rope && !rope.inv_freq.empty()) {
      if (twin == i) backs[i] = expected_detail::turns_back(rope, view, b.first);
      b.back = twin == i ? &backs[i] : buffered[twin].back;
    }
  }
  std::int64_t longest = 0;
  for (std::size_t r = 0; r < table.rows.size(); ++r)
    if (limits.rows[r].due) longest = std::max<std::int64_t>(longest, table.rows[r].length);
  const expected_detail::Sizes sizes(spec, longest, most, unit);
  parallel_for(0, static_cast<std::int64_t>(table.rows.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    expected_detail::Workspace work(sizes, spec.value_dim);
    for (std::int64_t r = begin; r < end; ++r) {
      const Row& row = table.rows[static_cast<std::size_t>(r)];
      if (!limits.rows[static_cast<std::size_t>(r)].due) continue;
      const auto g = static_cast<std::size_t>(r / spec.kv_heads);
      const RowGroup& group = table.groups[g];
      if (buffered[g].count == 0) {
        std::iota(out + row.first, out + row.first + row.length, 0.0F);
        continue;
      }
      expected_detail::RowScores(evidence, options_, sizes, turns[turn_of[g]], work)
          .run(row, group, buffered[g], out + row.first);
    }
    if (unit) cpu::matrix_unit()->release();
  });
  return scores;
}

}  // namespace kvkeep
