#include "step_check.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "kvkeep/core/error.h"

namespace kvkeep::lm::detail {
namespace {

void check_tokens(const LmConfig& config, const Step& step) {
  const std::size_t tokens = step.ids.size(), sequences = step.rows.size();
  require(sequences >= 1, "decoder step: no sequences; allowed one or more");
  require(step.indptr.size() == sequences + 1, "decoder step: indptr has ", step.indptr.size(), " entries for ", sequences,
          " sequences; allowed ", sequences + 1);
  require(step.indptr.front() == 0 && step.indptr.back() == static_cast<std::int64_t>(tokens), "decoder step: indptr runs from ",
          step.indptr.front(), " to ", step.indptr.back(), "; allowed 0 to the number of ids, ", tokens);
  require(step.positions.size() == tokens, "decoder step: ", step.positions.size(), " positions for ", tokens, " ids");
  for (std::size_t s = 0; s < sequences; ++s)
    require(step.indptr[s] < step.indptr[s + 1], "decoder step: sequence ", s,
            " has no tokens; allowed one or more (an empty prompt cannot be decoded)");
  for (std::size_t i = 0; i < tokens; ++i)
    require(step.ids[i] >= 0 && step.ids[i] < config.vocab, "decoder step: token id ", step.ids[i], " at place ", i,
            " is outside the vocabulary; allowed 0 to ", config.vocab - 1);
}

void check_side(const Tensor& side, std::string_view name, std::int32_t layer, std::int64_t heads, std::int64_t dim) {
  require(side.defined() && side.dim() == 4 && side.size(1) == heads && side.size(3) == dim, "decoder step: ", name, " of layer ", layer,
          " must be [B, ", heads, ", capacity, ", dim, "]; given ", side.defined() ? text(side.sizes()) : std::string("nothing"));
  require(side.device().is_cpu(), "decoder step: ", name, " of layer ", layer, " are on ", side.device().str(), "; allowed cpu");
  require(is_scorable(side.scalar_type()), "decoder step: ", name, " of layer ", layer, " are ", c10::toString(side.scalar_type()),
          "; allowed f32, f16, bf16");
  require(side.stride(3) == 1, "decoder step: ", name, " of layer ", layer, " have stride ", side.stride(3),
          " in their last dimension; allowed 1");
}

void check_cache(const ModelSpec& spec, std::span<const LayerCache> cache) {
  require(cache.size() == spec.layers.size(), "decoder step: a cache of ", cache.size(), " layers for a model of ", spec.layers.size());
  for (std::int32_t l = 0; l < spec.num_layers(); ++l) {
    const LayerCache& layer = cache[static_cast<std::size_t>(l)];
    check_side(layer.keys, "keys", l, spec.kv_heads, spec.key_dim);
    check_side(layer.values, "values", l, spec.kv_heads, spec.value_dim);
    require(layer.keys.size(0) == layer.values.size(0) && layer.keys.size(2) == layer.values.size(2), "decoder step: keys ",
            layer.keys.sizes(), " and values ", layer.values.sizes(), " of layer ", l, " differ in sequences or capacity");
  }
}

void check_places(const ModelSpec& spec, const Step& step, std::span<const LayerCache> cache) {
  std::set<std::int32_t> taken;
  for (std::size_t s = 0; s < step.rows.size(); ++s) {
    require(taken.insert(step.rows[s]).second, "decoder step: cache row ", step.rows[s], " is given to two sequences");
    for (const LayerCache& layer : cache)
      require(step.rows[s] >= 0 && step.rows[s] < layer.keys.size(0), "decoder step: sequence ", s, " is in cache row ", step.rows[s],
              "; allowed 0 to ", layer.keys.size(0) - 1);
  }
  const std::int64_t last = (spec.num_layers() - 1) * step.lengths.layer_stride +
                            static_cast<std::int64_t>(step.rows.size() - 1) * step.lengths.sequence_stride +
                            (spec.kv_heads - 1) * step.lengths.head_stride;
  require(last >= 0 && last < static_cast<std::int64_t>(step.lengths.counts.size()), "decoder step: ", step.lengths.counts.size(),
          " lengths for ", step.rows.size(), " sequences; one for each is needed");
}

void check_sequence(const ModelSpec& spec, const Step& step, std::span<const LayerCache> cache, std::int32_t s) {
  const auto begin = static_cast<std::size_t>(step.indptr[static_cast<std::size_t>(s)]),
             end = static_cast<std::size_t>(step.indptr[static_cast<std::size_t>(s) + 1]);
  const auto added = static_cast<std::int64_t>(end - begin);
  for (std::size_t i = begin + 1; i < end; ++i)
    require(step.positions[i - 1] < step.positions[i], "decoder step: positions of sequence ", s, " do not ascend: ", step.positions[i - 1],
            " before ", step.positions[i]);
  for (std::int32_t l = 0; l < spec.num_layers(); ++l)
    for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
      const std::int64_t used = step.lengths.at(l, s, h), capacity = cache[static_cast<std::size_t>(l)].keys.size(2);
      require(used >= 0 && used + added <= capacity, "decoder step: the cache is full: sequence ", s, " holds ", used, " slots in layer ",
              l, " and adds ", added, "; allowed ", capacity, " together");
      require(step.positions[begin] >= used, "decoder step: sequence ", s, " goes on at position ", step.positions[begin], " but holds ",
              used, " slots in layer ", l, "; allowed positions from the number of tokens seen");
    }
}

void check_mask(const ModelSpec& spec, std::span<const LayerCache> cache, std::span<const Tensor> visible) {
  if (visible.empty()) return;
  require(visible.size() == spec.layers.size(), "decoder step: visible has ", visible.size(), " tensors for ", spec.layers.size(),
          " layers");
  for (std::size_t l = 0; l < visible.size(); ++l) {
    const Tensor& mask = visible[l];
    const Tensor& keys = cache[l].keys;
    require(mask.defined() && mask.scalar_type() == c10::ScalarType::Byte && mask.is_contiguous() && mask.dim() == 3 &&
                mask.sizes() == keys.sizes().slice(0, 3),
            "decoder step: visible of layer ", l, " must be contiguous u8 ", keys.sizes().slice(0, 3));
  }
}

}  // namespace

void check_step(const LmConfig& config, const Step& step, std::span<const LayerCache> cache, const StepOptions& options) {
  check_tokens(config, step);
  check_cache(config.spec, cache);
  check_places(config.spec, step, cache);
  for (std::int32_t s = 0; s < static_cast<std::int32_t>(step.rows.size()); ++s) check_sequence(config.spec, step, cache, s);
  check_mask(config.spec, cache, options.visible);
}

}  // namespace kvkeep::lm::detail
