// SPDX-License-Identifier: Apache-2.0
#include "kvlab/calibrate.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

namespace kvkeep::lm {
namespace {

/// Sums of one pair over the tokens.
struct PairSum {
  double real = 0, imaginary = 0, modulus = 0;
};

/// Sums of every layer, [layers][Hq * F].
class QuerySums {
 public:
  explicit QuerySums(const ModelSpec& spec)
      : spec_(spec),
        sums_(spec.layers.size(),
              std::vector<PairSum>(static_cast<std::size_t>(spec.query_heads) * spec.rope.inv_freq.size())) {}

  /// Adds tokens [first, ...) of a step's queries, f32 [n_tokens, Hq, D].
  void add(std::int32_t layer, const Tensor& queries, std::int64_t first) {
    const auto pairs = static_cast<std::int64_t>(spec_.rope.inv_freq.size());
    std::vector<PairSum>& sums = sums_[static_cast<std::size_t>(layer)];
    const Tensor whole = queries.contiguous();
    const float* q = whole.const_data_ptr<float>();
    at::parallel_for(0, spec_.query_heads, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t h = begin; h < end; ++h)
        for (std::int64_t t = first; t < whole.size(0); ++t) {
          const float* x = q + (t * spec_.query_heads + h) * spec_.key_dim;
          for (std::int64_t f = 0; f < pairs; ++f) {
            const auto [i, j] = rope_pair(spec_.rope.style, f, pairs);
            const auto a = static_cast<double>(x[i]), b = static_cast<double>(x[j]);
            PairSum& sum = sums[static_cast<std::size_t>(h * pairs + f)];
            sum.real += a;
            sum.imaginary += b;
            sum.modulus += std::sqrt(a * a + b * b);
          }
        }
    });
  }

  [[nodiscard]] Calibration::Head head(std::int32_t layer, std::int32_t head, std::int64_t tokens) const {
    const std::size_t pairs = spec_.rope.inv_freq.size();
    const double share = 1.0 / static_cast<double>(tokens);
    Calibration::Head out;
    for (std::size_t f = 0; f < pairs; ++f) {
      const PairSum& sum = sums_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(head) * pairs + f];
      out.q_mean.emplace_back(static_cast<float>(sum.real * share), static_cast<float>(sum.imaginary * share));
      out.q_abs_mean.push_back(static_cast<float>(sum.modulus * share));
    }
    return out;
  }

 private:
  const ModelSpec& spec_;
  std::vector<std::vector<PairSum>> sums_;
};

}  // namespace

Calibration calibrate(Decoder& decoder, const std::vector<std::vector<std::int32_t>>& sequences,
                      const CalibrationRun& run) {
  const ModelSpec& spec = decoder.spec();
  KVKEEP_REQUIRE(run.skip >= 0 && run.chunk >= 1, "calibrate: skip is ", run.skip, " and chunk ", run.chunk,
                 "; allowed 0 or more, and 1 or more");
  for (const std::int32_t l : spec.full_layers())
    KVKEEP_REQUIRE(spec.rope_of(l).rotary_dim() == spec.key_dim && spec.key_dim > 0, "calibrate: RoPE turns ",
                   spec.rope_of(l).rotary_dim(), " of ", spec.key_dim, " components of a head of layer ", l,
                   "; allowed all of them");
  std::size_t longest = 0;
  std::int64_t counted = 0;
  for (const std::vector<std::int32_t>& ids : sequences) {
    longest = std::max(longest, ids.size());
    counted += std::max<std::int64_t>(static_cast<std::int64_t>(ids.size()) - run.skip, 0);
    for (std::size_t i = 0; i < ids.size(); ++i)
      KVKEEP_REQUIRE(ids[i] >= 0 && ids[i] < decoder.config().vocab, "calibrate: token id ", ids[i], " at place ", i,
                     " is outside the vocabulary; allowed 0 to ", decoder.config().vocab - 1);
  }
  KVKEEP_REQUIRE(counted > 0, "calibrate: no token is left: the longest sequence has ", longest, " and the first ",
                 run.skip, " of each do not count; allowed ", run.skip + 1, " tokens or more");

  QuerySums sums(spec);
  const std::vector<LayerCache> cache = decoder.make_cache(1, static_cast<std::int64_t>(longest), run.cache_dtype);
  std::vector<std::int32_t> positions(longest);
  std::iota(positions.begin(), positions.end(), 0);
  std::int32_t begin = 0;
  StepOptions options{.logits = Logits::none};
  options.on_layer = [&](const LayerSight& sight) {
    sums.add(sight.layer, sight.queries.cpu(), std::max(run.skip - begin, 0));
  };
  std::int64_t done = 0;
  for (const std::vector<std::int32_t>& ids : sequences)
    for (begin = 0; begin < static_cast<std::int32_t>(ids.size()); begin += run.chunk) {
      const std::int32_t n = std::min(run.chunk, static_cast<std::int32_t>(ids.size()) - begin);
      const std::vector<std::int32_t> whole{0, n}, row{0}, held{begin};
      decoder.forward({std::span(ids).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(n)), whole,
                       std::span<const std::int32_t>(positions).subspan(static_cast<std::size_t>(begin),
                                                                        static_cast<std::size_t>(n)),
                       row, held},
                      cache, options);
      done += n;
      if (run.progress) run.progress(done);
    }

  Calibration out;
  out.head_dim = spec.key_dim;
  out.rope_style = spec.rope.style;
  out.inv_freq = spec.rope.inv_freq;
  out.attention_scaling = spec.rope.attention_scaling;
  out.model_name = run.model_name;
  for (std::int32_t l = 0; l < spec.num_layers(); ++l)
    for (std::int32_t h = 0; h < spec.query_heads; ++h) out.heads[{l, h}] = sums.head(l, h, counted);
  return out;
}

}  // namespace kvkeep::lm
