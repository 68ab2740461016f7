#pragma once
/// TriAttention: how strongly future queries will attend to a key, estimated from statistics of each head's queries
/// before RoPE. Source: TriAttention (WeianMao/triattention). Differs: the factor of a scaled RoPE (YaRN) enters cached
/// keys once, as in the published Hugging Face path, but not in the published vLLM path; keys that are not finite are
/// left out of the normalisation; no tie noise; phases in double.

#include <cstdint>
#include <memory>

#include "kvkeep/score/calibration.h"
#include "kvkeep/score/scorer.h"

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

#ifndef KVKEEP_HEADER_ONLY
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

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/score/triattention-inl.h"
#endif
