// SPDX-License-Identifier: Apache-2.0
#pragma once
/// TriAttention: how strongly future queries will attend to a key, estimated from statistics of each head's queries
/// before RoPE. Source: TriAttention (WeianMao/triattention). Differs: the factor of a scaled RoPE (YaRN) enters cached
/// keys once, as in the published Hugging Face path, but not in the published vLLM path; keys that are not finite are
/// left out of the normalisation; no tie noise; phases in double.
#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <memory>

#include "kvkeep/core/error.h"
#include "kvkeep/core/hd.h"
#include "kvkeep/core/header_only.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/core/strict_math.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/score/calibration.h"
#include "kvkeep/score/scorer.h"
#include "kvkeep/simd/aligned.h"
#include "kvkeep/simd/triattention_lanes.h"

namespace kvkeep {

struct TriAttentionOptions {
  enum class Aggregate : std::uint8_t {
    mean,  ///< over the future offsets (published): one product per query head
    max,   ///< over the future offsets: one product per query head and offset
  };
  enum class Group : std::uint8_t {
    max,  ///< of the query heads that share the KV head (published)
    mean,
  };
  enum class Deviation : std::uint8_t {
    population,  ///< mean and deviation (floor 1e-6) over the slots that are not guarded: the published Hugging Face
                 ///< path
    sample,  ///< n - 1, over every slot, including guarded ones; a deviation below 1e-8 counts as 1: the published vLLM
             ///< path
  };
  Aggregate aggregate = Aggregate::mean;
  bool normalize = true;  ///< z-score of each query head before the group is combined
  Group group = Group::max;
  std::int64_t offset_max = 65536;  ///< offsets 1, 2, 4, ... up to this
  Deviation deviation = Deviation::population;

  void describe(Fields& f) {
    f.choice("aggregate", aggregate, {{"mean", Aggregate::mean}, {"max", Aggregate::max}}, "over the future offsets");
    f.flag("normalize", normalize, "z-score of each query head before the group is combined");
    f.choice("group", group, {{"max", Group::max}, {"mean", Group::mean}}, "over the query heads of the KV head");
    f.integer("offset_max", offset_max, 1, 1 << 30, "future offsets are 1, 2, 4, ... up to this");
    f.choice("std", deviation, {{"population", Deviation::population}, {"sample", Deviation::sample}},
             "deviation of the z-score: over the slots that are not protected (floor 1e-6), or with n - 1 over all "
             "slots");
  }
};

class TriAttention final : public Scorer {
 public:
  using Options = TriAttentionOptions;
  static constexpr ScorerTraits traits{
      .name = "triattention",
      .what = "slots that future queries will attend to, by where each head's queries are before RoPE",
      .source = "TriAttention (WeianMao/triattention)"};

  TriAttention(Calibration calibration, TriAttentionOptions options = {})
      : calibration_(std::make_shared<const Calibration>(std::move(calibration))), options_(options) {}

#if KVKEEP_FILES
  /// Options with the calibration file that they name.
  [[nodiscard]] static std::unique_ptr<TriAttention> make(Fields& f) {
    const std::filesystem::path file =
        f.file("calibration", "query statistics of the model, as kvkeep calibrate or the published tool writes them");
    Options options;
    options.describe(f);
    return std::make_unique<TriAttention>(f.listing() ? Calibration() : load_calibration(file), options);
  }
#endif

  [[nodiscard]] std::string_view name() const override { return traits.name; }
  [[nodiscard]] Needs needs() const override { return {.keys = true, .calibration = true, .rope = true}; }
  [[nodiscard]] AcrossHeads across_heads() const override { return AcrossHeads::nothing; }
  [[nodiscard]] std::vector<std::string> problems(const ModelSpec& spec) const override {
    return calibration_->problems(spec);
  }

  /// z_f = x_f + i y_f are the rotary pairs of a cached key, a is RoPE's scaling, P the next position, and q = q_mean
  /// and m = q_abs_mean belong to each query head:
  ///   trig(delta) = a sum_f Re(q_f conj(z_f) exp(i w_f (P + delta)));  norm = a sum_f (m_f - |q_f|) |z_f|;  raw =
  ///   aggregate over delta of trig + norm.
  /// g[t] = max or mean over the KV head's query heads of (raw - mean) / deviation. The mean over offsets is linear, so
  /// it is applied to the queries: one vector per query head, computed in double. Keys are read once, in their stored
  /// dtype, whatever the aggregate; equal keys get bit-identical scores before and after normalisation. Cost: D * (3 G)
  /// flop-pairs per key (mean) or D * G * (offsets + 1) (max), and F square roots. Workspace: workspace_bytes() per
  /// thread, and 16 F bytes for every offset and sequence. Requires: problems(spec) is empty.
  [[nodiscard]] Scores score(const Evidence& evidence, const Limits& limits,
                             const WindowAttention& seen) const override;

  /// Makes a query head's raw scores comparable: `shift` is subtracted, then `factor` multiplied.
  struct Standard {
    float shift = 0, factor = 1;
  };
  /// From the `count` raw scores that are finite: their mean, and the sum of squares around it.
  [[nodiscard]] KVKEEP_HD static Standard standard_of(double count, double mean, double squares, bool sample) {
    double spread = 1;
    if (count > 0 && !sample) {
      spread = std::sqrt(squares / count);
      spread = spread < 1e-6 ? 1e-6 : spread;
    } else if (count > 1) {
      spread = std::sqrt(squares / (count - 1));
      if (spread < 1e-8) spread = 1;
    }
    return {static_cast<float>(mean), static_cast<float>(1.0 / spread)};
  }

  /// Bytes per thread for a row of `length` slots: G raw scores per slot, the columns of the products, two vectors of
  /// keys as f32 with the moduli of their pairs, and one sum per query head for these keys. 4 (G length + G F (2
  /// offsets + 1) + 2 L (3 F + G)), L: lanes of a machine vector; offsets is 1 for the mean.
  [[nodiscard]] static std::int64_t workspace_bytes(std::int64_t group, std::int64_t length, std::int64_t pairs,
                                                    std::int64_t offsets);

  [[nodiscard]] const TriAttentionOptions& options() const { return options_; }
  [[nodiscard]] const Calibration& calibration() const { return *calibration_; }

 private:
  std::shared_ptr<const Calibration> calibration_;
  TriAttentionOptions options_;
};

inline std::int32_t Calibration::query_heads(const std::vector<std::int32_t>& layers) const {
  std::int32_t most = 0;
  for (const std::int32_t l : layers) {
    const auto behind = heads.lower_bound({l + 1, 0});
    if (behind != heads.begin() && std::prev(behind)->first.first == l)
      most = std::max(most, std::prev(behind)->first.second + 1);
  }
  return most;
}

inline std::vector<std::string> Calibration::problems(const ModelSpec& spec) const {
  constexpr double kTolerance = 1e-4;
  std::vector<std::string> found;
  const auto say = [&](const auto&... parts) { found.push_back(text("calibration: ", parts...)); };
  if (head_dim < 2 || head_dim % 2 != 0) {
    say("head_dim is ", head_dim, "; allowed an even number from 2");
    return found;
  }
  const std::vector<std::int32_t> layers = spec.full_layers();
  if (head_dim != spec.key_dim) say("head_dim is ", head_dim, "; allowed the model's ", spec.key_dim);
  for (const std::int32_t l : layers) {
    const RopeSpec& rope = spec.rope_of(l);
    const std::size_t before = found.size();
    if (head_dim == spec.key_dim && pairs() != static_cast<std::int64_t>(rope.inv_freq.size()))
      say("F = head_dim / 2 is ", pairs(), "; allowed the number of rotary pairs of layer ", l, ", ",
          rope.inv_freq.size());
    if (rope_style != rope.style)
      say("rope_style is ", name_of(rope_style), "; allowed that of layer ", l, ", ", name_of(rope.style));
    for (std::size_t f = 0; inv_freq.size() == rope.inv_freq.size() && f < inv_freq.size(); ++f) {
      const double own = rope.inv_freq[f];
      if (std::abs(inv_freq[f] - own) <= kTolerance * std::abs(own)) continue;
      say("inv_freq[", f, "] is ", inv_freq[f], "; allowed that of layer ", l, ", ", own, ", within ", kTolerance,
          " of it");
      break;
    }
    if (found.size() > before) break;  // the other layers lack the same
  }
  const std::int32_t given = query_heads(layers),
                     wanted = spec.query_heads > 0 ? spec.group() * spec.whole_heads() : given;
  if (given == 0) {
    say("it holds none of the model's layers (", layers.empty() ? -1 : layers.front(), " to ",
        layers.empty() ? -1 : layers.back(), ")");
    return found;
  }
  if (given % spec.whole_heads() != 0)
    say("it has ", given, " query heads; allowed a multiple of the model's ", spec.whole_heads(), " KV heads");
  else if (given != wanted)
    say("it has ", given, " query heads; allowed the model's ", wanted);
  std::string missing, infinite;
  std::int64_t lacking = 0, bad = 0;
  for (const std::int32_t l : layers)
    for (std::int32_t h = 0; h < wanted; ++h) {
      const auto head = heads.find({l, h});
      if (head == heads.end()) {
        if (lacking++ == 0) missing = text("layer ", l, ", head ", h);
        continue;
      }
      const Head& s = head->second;
      const bool finite =
          std::all_of(s.q_mean.begin(), s.q_mean.end(),
                      [](const auto& z) { return std::isfinite(z.real()) && std::isfinite(z.imag()); }) &&
          std::all_of(s.q_abs_mean.begin(), s.q_abs_mean.end(), [](float x) { return std::isfinite(x); });
      if (!finite && bad++ == 0) infinite = text("layer ", l, ", head ", h);
      if (static_cast<std::int64_t>(s.q_mean.size()) != pairs() ||
          static_cast<std::int64_t>(s.q_abs_mean.size()) != pairs())
        say("layer ", l, ", head ", h, " has ", s.q_mean.size(), " means and ", s.q_abs_mean.size(),
            " moduli; allowed F = ", pairs());
    }
  if (lacking > 0)
    say(missing, " is missing", lacking > 1 ? text(" (and ", lacking - 1, " more)") : "",
        "; allowed every query head of every layer that is cut");
  if (bad > 0)
    say(infinite, bad > 1 ? text(" (and ", bad - 1, " more)") : "",
        " holds a number that is not finite; allowed finite numbers");
  return found;
}

namespace triattention_detail {

using Options = TriAttentionOptions;
using Turn = std::complex<double>;

/// One turn after the other.
inline Turn both(const Turn& a, const Turn& b) {
  return {product(a.real(), b.real()) - product(a.imag(), b.imag()),
          product(a.real(), b.imag()) + product(a.imag(), b.real())};
}

/// exp(i w_f offset), [offsets, F]; with the mean, one row: their mean.
inline std::vector<Turn> offset_turns(const RopeSpec& rope, const Options& options) {
  const std::size_t pairs = rope.inv_freq.size();
  std::vector<Turn> turns;
  std::int64_t count = 0;
  for (std::int64_t offset = 1; offset <= options.offset_max; offset *= 2, ++count)
    for (const double w : rope.inv_freq) turns.push_back(std::polar(1.0, rope_angle(offset, w)));
  if (options.aggregate == Options::Aggregate::max) return turns;
  for (std::size_t f = 0; f < pairs; ++f) {
    Turn sum = 0;
    for (std::size_t i = f; i < turns.size(); i += pairs) sum += turns[i];
    turns[f] = sum / static_cast<double>(count);
  }
  turns.resize(pairs);
  return turns;
}

/// One thread's memory, divided into its parts.
struct Workspace {
  cpu::AlignedFloats memory;
  std::int64_t held = 0;
  float *raw = nullptr, *trig = nullptr, *norm = nullptr, *scratch = nullptr;
  std::vector<float> shift, factor;  ///< [group] of TriAttention::Standard

  void fit(std::int64_t group, std::int64_t length, std::int64_t pairs, std::int64_t offsets) {
    shift.resize(static_cast<std::size_t>(group), 0.0F);
    factor.resize(static_cast<std::size_t>(group), 1.0F);
    const std::int64_t floats =
        TriAttention::workspace_bytes(group, length, pairs, offsets) / static_cast<std::int64_t>(sizeof(float));
    if (held < floats) {
      memory.reset();
      memory = cpu::aligned_floats(floats);
      held = floats;
    }
    scratch = memory.get();
    trig = scratch + cpu::tri_scratch(group, pairs);
    norm = trig + group * offsets * 2 * pairs;
    raw = norm + group * pairs;
  }
};

/// Columns of the query heads of KV head `kv_head` of the model.
inline cpu::TriColumns columns_of(const Calibration& calibration, std::int32_t layer, std::int64_t kv_head,
                                  std::int64_t group, double scaling, const std::vector<Turn>& now,
                                  const std::vector<Turn>& later, Workspace& work) {
  const std::size_t pairs = now.size();
  const auto offsets = static_cast<std::int64_t>(later.size() / pairs),
             side = offsets == 1 ? group : offsets;  // columns that are side by side
  for (std::int64_t g = 0; g < group; ++g) {
    const Calibration::Head& head = calibration.heads.at({layer, static_cast<std::int32_t>(kv_head * group + g)});
    float* first = work.trig + (offsets == 1 ? g : g * static_cast<std::int64_t>(pairs) * 2 * offsets);
    for (std::size_t f = 0; f < pairs; ++f) {
      const Turn q(static_cast<double>(head.q_mean[f].real()), static_cast<double>(head.q_mean[f].imag()));
      work.norm[static_cast<std::int64_t>(f) * group + g] =
          static_cast<float>(scaling * (static_cast<double>(head.q_abs_mean[f]) - std::abs(q)));
      for (std::int64_t o = 0; o < offsets; ++o) {
        const Turn w = both(both(scaling * q, now[f]), later[static_cast<std::size_t>(o) * pairs + f]);
        float* trig = first + static_cast<std::int64_t>(f) * 2 * side + o;
        trig[0] = static_cast<float>(w.real());
        trig[side] = static_cast<float>(w.imag());
      }
    }
  }
  return {group, offsets, work.trig, work.norm};
}

inline TriAttention::Standard standard_of(const float* raw, std::int64_t length, const Protected& guarded,
                                          Options::Deviation deviation) {
  const bool sample = deviation == Options::Deviation::sample;
  const float* from = raw + (sample ? 0 : guarded.sinks);
  const std::int64_t n = sample ? length : length - guarded.sinks - guarded.recents;
  if (n <= 0) return {};
  const cpu::Moments moments = cpu::finite_sum(from, n);
  if (moments.count == 0) return {};
  const double mean = moments.sum / static_cast<double>(moments.count);
  return TriAttention::standard_of(static_cast<double>(moments.count), mean, cpu::finite_squares(from, n, mean),
                                   sample);
}

}  // namespace triattention_detail

inline std::int64_t TriAttention::workspace_bytes(std::int64_t group, std::int64_t length, std::int64_t pairs,
                                                  std::int64_t offsets) {
  return static_cast<std::int64_t>(sizeof(float)) *
         (group * length + group * pairs * (2 * offsets + 1) + cpu::tri_scratch(group, pairs));
}

inline Scores TriAttention::score(const Evidence& evidence, const Limits& limits, const WindowAttention&) const {
  require_host("triattention", evidence.table.device);
  const RowTable& table = evidence.table;
  const ModelSpec& spec = evidence.spec;
  with_dtype("triattention", table.key_dtype, [](auto) {});
  const Scores scores{empty({table.slots}, Dtype::f32)};
  float* g = scores.data.data<float>();
  const std::int64_t group = calibration_->query_heads(spec.full_layers()) / spec.whole_heads();
  const std::int64_t pairs = calibration_->pairs();
  using Turns = std::vector<triattention_detail::Turn>;
  std::map<const RopeSpec*, Turns> later;                         // of the offsets
  std::map<std::pair<const RopeSpec*, std::int32_t>, Turns> now;  // exp(i w_f P) by sequence
  for (const RowGroup& rows : table.groups) {
    const RopeSpec& rope = spec.rope_of(rows.layer);
    if (!later.contains(&rope)) later[&rope] = triattention_detail::offset_turns(rope, options_);
    Turns& turns = now[{&rope, rows.sequence}];
    for (std::size_t f = turns.size(); f < rope.inv_freq.size(); ++f)
      turns.push_back(std::polar(1.0, rope_angle(rows.next_position, rope.inv_freq[f])));
  }
  const auto make = [] { return triattention_detail::Workspace(); };
  each_due_row(table, limits, make, [&](std::size_t r, const Row& row, triattention_detail::Workspace& work) {
    const RopeSpec& rope = spec.rope_of(row.layer);
    const Turns& offsets = later.at(&rope);
    work.fit(group, row.length, pairs, static_cast<std::int64_t>(offsets.size()) / pairs);
    const cpu::TriColumns columns =
        triattention_detail::columns_of(*calibration_, row.layer, spec.first_head + row.head, group,
                                        rope.attention_scaling, now.at({&rope, row.sequence}), offsets, work);
    cpu::tri_scores({row.keys, table.key_dtype, spec.key_dim}, row.length, rope.style, columns, work.scratch, work.raw);
    for (std::int64_t h = 0; options_.normalize && h < group; ++h) {
      const Standard s = triattention_detail::standard_of(work.raw + h * row.length, row.length, limits.rows[r].guarded,
                                                          options_.deviation);
      work.shift[static_cast<std::size_t>(h)] = s.shift;
      work.factor[static_cast<std::size_t>(h)] = s.factor;
    }
    cpu::tri_combine(work.raw, group, row.length, work.shift.data(), work.factor.data(),
                     options_.group == Options::Group::max, g + row.first);
  });
  return scores;
}

}  // namespace kvkeep
