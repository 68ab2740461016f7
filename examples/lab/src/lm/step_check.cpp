// SPDX-License-Identifier: Apache-2.0
#include "step_check.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string_view>

#include "kvkeep/core/cache_view.h"
#include "kvkeep/core/error.h"

namespace kvkeep::lm::detail {
namespace {

void check_tokens(const io::ModelConfig& config, const Step& step) {
  const std::size_t tokens = step.ids.size(), sequences = step.rows.size();
  KVKEEP_REQUIRE(sequences >= 1, "decoder step: no sequences; allowed one or more");
  KVKEEP_REQUIRE(step.indptr.size() == sequences + 1, "decoder step: indptr has ", step.indptr.size(), " entries for ",
                 sequences, " sequences; allowed ", sequences + 1);
  KVKEEP_REQUIRE(step.indptr.front() == 0 && step.indptr.back() == static_cast<std::int64_t>(tokens),
                 "decoder step: indptr runs from ", step.indptr.front(), " to ", step.indptr.back(),
                 "; allowed 0 to the number of ids, ", tokens);
  KVKEEP_REQUIRE(step.positions.size() == tokens, "decoder step: ", step.positions.size(), " positions for ", tokens,
                 " ids");
  for (std::size_t s = 0; s < sequences; ++s)
    KVKEEP_REQUIRE(step.indptr[s] < step.indptr[s + 1], "decoder step: sequence ", s,
                   " has no tokens; allowed one or more (an empty prompt cannot be decoded)");
  for (std::size_t i = 0; i < tokens; ++i)
    KVKEEP_REQUIRE(step.ids[i] >= 0 && step.ids[i] < config.vocab, "decoder step: token id ", step.ids[i], " at place ",
                   i, " is outside the vocabulary; allowed 0 to ", config.vocab - 1);
}

bool is_paged(std::span<const LayerKv> cache) {
  return !cache.empty() && std::holds_alternative<PagedKv>(cache.front());
}

// Where the step's sequences may live, and how many slots each has room for.
struct Room {
  std::int64_t places = 0, capacity = 0;
};

Room room_of(const LayerKv& layer, const Tensor& block_table) {
  const LayerSides sides = sides_of(layer);
  if (!sides.paged) return {sides.keys.size(0), sides.keys.size(2)};
  return {block_table.size(0), block_table.size(1) * sides.keys.size(sides.slot)};
}

void check_side(const kvkeep::Tensor& side, const kvkeep::Tensor& scales, Device device, bool kernels,
                const LayerSides& sides, std::string_view name, std::int32_t layer, std::int64_t heads,
                std::int64_t dim) {
  const std::int64_t numbers = side.defined() ? numbers_of(side.dtype()) : 1;
  if (!side.defined() || side.dim() != 4 || side.size(sides.head) != heads ||
      side.size(3) * numbers != dim) {  // the message is made only if it is needed
    if (dim % numbers == 0) dim /= numbers;
    const std::string shape = !sides.paged      ? text("[B, ", heads, ", capacity, ", dim, "]")
                              : sides.slot == 1 ? text("[pages, page_size, ", heads, ", ", dim, "]")
                                                : text("[pages, ", heads, ", page_size, ", dim, "]");
    refuse("decoder step: ", name, " of layer ", layer, " must be ", shape, "; given ",
           side.defined() ? text(side.sizes()) : std::string("nothing"));
  }
  KVKEEP_REQUIRE(side.device() == device, "decoder step: ", name, " of layer ", layer, " are on ", side.device().str(),
                 "; allowed ", device.str(), ", where the weights are");
  const bool scaled = side.dtype() == Dtype::i8;
  KVKEEP_REQUIRE(is_scorable(side.dtype()) || scaled || is_blocks(side.dtype()), "decoder step: ", name, " of layer ",
                 layer, " are ", side.dtype(), "; allowed f32, f16, bf16, i8, q8_0, q4_0");
  KVKEEP_REQUIRE_AS(Unsupported, kernels || is_scorable(side.dtype()), "decoder step: ", name, " of layer ", layer,
                    " are ", side.dtype(), " under operators; allowed f32, f16, bf16");
  if (scaled)
    KVKEEP_REQUIRE(scales.defined() && scales.dtype() == Dtype::f32 && scales.dim() == 3 &&
                       scales.size(0) == side.size(0) && scales.size(1) == side.size(1) &&
                       scales.size(2) == side.size(2) && scales.is_contiguous() && scales.device().is_cpu(),
                   "decoder step: scales of the ", name, " of layer ", layer, " must be contiguous f32 [", side.size(0),
                   ", ", side.size(1), ", ", side.size(2), "]; given ",
                   scales.defined() ? text(scales.dtype(), " ", scales.sizes()) : std::string("nothing"));
  KVKEEP_REQUIRE(side.stride(3) == 1, "decoder step: ", name, " of layer ", layer, " have stride ", side.stride(3),
                 " in their last dimension; allowed 1");
}

void check_cache(const ModelSpec& spec, Device device, bool kernels, std::span<const LayerKv> cache) {
  KVKEEP_REQUIRE(cache.size() == spec.layers.size(), "decoder step: a cache of ", cache.size(),
                 " layers for a model of ", spec.layers.size());
  const bool paged = is_paged(cache);
  std::int64_t page_size = 0;
  for (std::int32_t l = 0; l < spec.num_layers(); ++l) {
    const LayerKv& layer = cache[static_cast<std::size_t>(l)];
    KVKEEP_REQUIRE(!std::holds_alternative<std::monostate>(layer) && std::holds_alternative<PagedKv>(layer) == paged,
                   "decoder step: layer ", l, " is ",
                   std::holds_alternative<std::monostate>(layer) ? "without rows"
                   : paged                                       ? "dense"
                                                                 : "in pages",
                   "; allowed ", paged ? "pages" : "dense layers", " as the first layer");
    const LayerSides sides = sides_of(layer);
    check_side(sides.keys, sides.key_scales, device, kernels, sides, "keys", l, spec.kv_heads, spec.key_dim);
    check_side(sides.values, sides.value_scales, device, kernels, sides, "values", l, spec.kv_heads, spec.value_dim);
    KVKEEP_REQUIRE(
        sides.keys.size(0) == sides.values.size(0) && sides.keys.size(sides.slot) == sides.values.size(sides.slot),
        "decoder step: keys ", sides.keys.sizes(), " and values ", sides.values.sizes(), " of layer ", l, " differ in ",
        paged ? "pages or page size" : "sequences or capacity");
    if (!paged) continue;
    if (l == 0) page_size = sides.keys.size(sides.slot);
    KVKEEP_REQUIRE(is_page_size(page_size), "decoder step: pages of ", page_size, " slots; allowed 1 to ",
                   kLargestPage);
    KVKEEP_REQUIRE(sides.keys.size(sides.slot) == page_size, "decoder step: pages of layer ", l, " hold ",
                   sides.keys.size(sides.slot), " slots; allowed ", page_size, " as in the first layer");
  }
}

void check_table(const Step& step, bool paged, const Tensor& table) {
  KVKEEP_REQUIRE(paged || !table.defined(), "decoder step: a block table for a dense cache; allowed with pages");
  if (!paged) return;
  KVKEEP_REQUIRE(!table.defined() || table.device().is_cpu(), "decoder step: the block table is on ",
                 table.defined() ? table.device().str() : std::string(), "; allowed host memory");
  KVKEEP_REQUIRE(table.defined() && table.dim() == 2 && table.scalar_type() == at::kInt &&
                     (table.size(1) <= 1 || table.stride(1) == 1),
                 "decoder step: a paged cache needs a block table; allowed i32 [sequences, max_pages] in host memory, "
                 "its last dimension contiguous");
  KVKEEP_REQUIRE(step.rows.size() <= static_cast<std::size_t>(table.size(0)), "decoder step: a block table of ",
                 table.size(0), " rows for ", step.rows.size(), " sequences");
}

void check_places(const ModelSpec& spec, const Step& step, std::span<const LayerKv> cache, const Tensor& block_table) {
  std::set<std::int32_t> taken;
  for (std::size_t s = 0; s < step.rows.size(); ++s) {
    KVKEEP_REQUIRE(taken.insert(step.rows[s]).second, "decoder step: cache row ", step.rows[s],
                   " is given to two sequences");
    for (const LayerKv& layer : cache) {
      const std::int64_t places = room_of(layer, block_table).places;
      KVKEEP_REQUIRE(step.rows[s] >= 0 && step.rows[s] < places, "decoder step: sequence ", s, " is in cache row ",
                     step.rows[s], "; allowed 0 to ", places - 1);
    }
  }
  const std::int64_t last = (spec.num_layers() - 1) * step.lengths.layer_stride +
                            static_cast<std::int64_t>(step.rows.size() - 1) * step.lengths.sequence_stride +
                            (spec.kv_heads - 1) * step.lengths.head_stride;
  KVKEEP_REQUIRE(last >= 0 && last < static_cast<std::int64_t>(step.lengths.counts.size()),
                 "decoder step: ", step.lengths.counts.size(), " lengths for ", step.rows.size(),
                 " sequences; one for each is needed");
}

void check_sequence(const ModelSpec& spec, const Step& step, std::span<const LayerKv> cache, const Tensor& block_table,
                    std::int32_t s) {
  const auto begin = static_cast<std::size_t>(step.indptr[static_cast<std::size_t>(s)]),
             end = static_cast<std::size_t>(step.indptr[static_cast<std::size_t>(s) + 1]);
  const auto added = static_cast<std::int64_t>(end - begin);
  for (std::size_t i = begin + 1; i < end; ++i)
    KVKEEP_REQUIRE(step.positions[i - 1] < step.positions[i], "decoder step: positions of sequence ", s,
                   " do not ascend: ", step.positions[i - 1], " before ", step.positions[i]);
  for (std::int32_t l = 0; l < spec.num_layers(); ++l)
    for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
      const std::int64_t used = step.lengths.at(l, s, h),
                         capacity = room_of(cache[static_cast<std::size_t>(l)], block_table).capacity;
      KVKEEP_REQUIRE(used >= 0 && used + added <= capacity, "decoder step: the cache is full: sequence ", s, " holds ",
                     used, " slots in layer ", l, " and adds ", added, "; allowed ", capacity, " together");
      KVKEEP_REQUIRE(step.positions[begin] >= used, "decoder step: sequence ", s, " continues at position ",
                     step.positions[begin], " but holds ", used, " slots in layer ", l,
                     "; allowed positions from the number of tokens seen");
    }
}

// Every page exists, and none is written for two sequences, or twice for one.
void check_pages(const ModelSpec& spec, const Step& step, std::span<const LayerKv> cache, const Tensor& block_table) {
  std::int64_t pages = std::numeric_limits<std::int64_t>::max();
  for (const LayerKv& layer : cache) pages = std::min(pages, sides_of(layer).keys.size(0));
  const std::int64_t size =
      room_of(cache.front(), block_table).capacity / std::max<std::int64_t>(1, block_table.size(1));
  std::map<std::int32_t, std::size_t> written;
  for (std::size_t s = 0; s < step.rows.size(); ++s) {
    const std::int64_t added = step.indptr[s + 1] - step.indptr[s];
    std::int64_t shortest = std::numeric_limits<std::int64_t>::max(), longest = 0;
    for (std::int32_t l = 0; l < spec.num_layers(); ++l)
      for (std::int32_t h = 0; h < spec.kv_heads; ++h) {
        const std::int64_t used = step.lengths.at(l, static_cast<std::int32_t>(s), h);
        shortest = std::min(shortest, used);
        longest = std::max(longest, used);
      }
    const std::int32_t* row = block_table.const_data_ptr<std::int32_t>() + step.rows[s] * block_table.stride(0);
    for (std::int64_t p = 0; p * size < longest + added; ++p) {
      KVKEEP_REQUIRE(row[p] >= 0 && row[p] < pages, "decoder step: page ", p, " of sequence ", s, " is ", row[p],
                     "; allowed 0 to ", pages - 1);
      if ((p + 1) * size <= shortest) continue;
      const auto [other, first] = written.emplace(row[p], s);
      KVKEEP_REQUIRE(first, "decoder step: page ", row[p], " would be written for sequence ", other->second,
                     " and as page ", p, " of sequence ", s,
                     "; allowed pages that nobody else holds (PagedSequences::append copies shared ones)");
    }
  }
}

void check_mask(const ModelSpec& spec, Device device, std::span<const LayerKv> cache, const Tensor& block_table,
                std::span<const Tensor> visible) {
  if (visible.empty()) return;
  KVKEEP_REQUIRE(visible.size() == spec.layers.size(), "decoder step: visible has ", visible.size(), " tensors for ",
                 spec.layers.size(), " layers");
  for (std::size_t l = 0; l < visible.size(); ++l) {
    const Tensor& mask = visible[l];
    const Room room = room_of(cache[l], block_table);
    KVKEEP_REQUIRE(mask.defined() && mask.scalar_type() == c10::ScalarType::Byte && mask.is_contiguous() &&
                       mask.dim() == 3 && mask.size(0) == room.places && mask.size(1) == spec.kv_heads &&
                       mask.size(2) == room.capacity,
                   "decoder step: visible of layer ", l, " must be contiguous u8 [", room.places, ", ", spec.kv_heads,
                   ", ", room.capacity, "]");
    KVKEEP_REQUIRE(device_of(mask.device()) == device, "decoder step: visible of layer ", l, " is on ",
                   mask.device().str(), "; allowed ", device.str(), ", where the weights are");
  }
}

// Later steps assume that a sliding layer's slots hold consecutive positions up to them (Decoder), so tokens that its
// window reaches must continue.
void check_windows(const ModelSpec& spec, const LayerSight& sight, const Onward& onward, std::size_t s) {
  const auto begin = static_cast<std::size_t>(sight.indptr[s]), end = static_cast<std::size_t>(sight.indptr[s + 1]);
  const std::size_t gone = end - begin - static_cast<std::size_t>(onward.indptr[s + 1] - onward.indptr[s]);
  if (gone == 0 || gone == end - begin) return;
  for (std::int32_t l = sight.layer + 1; l < spec.num_layers(); ++l) {
    const LayerSpec& kind = spec.layers[static_cast<std::size_t>(l)];
    if (kind.kind != LayerKind::sliding) continue;
    // Newest first, as long as the two lists agree.
    for (std::size_t back = 1;
         back <= end - begin && sight.positions[end - back] > sight.positions[end - 1] - kind.window + 1; ++back) {
      const std::int64_t place = onward.indptr[s + 1] - static_cast<std::int64_t>(back);
      KVKEEP_REQUIRE(place >= onward.indptr[s] &&
                         onward.tokens[static_cast<std::size_t>(place)] == static_cast<std::int64_t>(end - back),
                     "decoder step: after layer ", sight.layer, ", position ", sight.positions[end - back],
                     " of sequence ", s, " does not continue; allowed with its newest ", kind.window - 1,
                     " positions, which layer ", l, " slides over");
    }
  }
}

}  // namespace

void check_onward(const ModelSpec& spec, Logits logits, const LayerSight& sight, const Onward& onward) {
  const std::size_t sequences = sight.indptr.size() - 1;
  const auto tokens = static_cast<std::int64_t>(onward.tokens.size());
  KVKEEP_REQUIRE(onward.indptr.size() == sequences + 1, "decoder step: after layer ", sight.layer, " indptr has ",
                 onward.indptr.size(), " entries for ", sequences, " sequences; allowed ", sequences + 1);
  KVKEEP_REQUIRE(onward.indptr.front() == 0 && onward.indptr.back() == tokens, "decoder step: after layer ",
                 sight.layer, " indptr runs from ", onward.indptr.front(), " to ", onward.indptr.back(),
                 "; allowed 0 to the number of tokens that continue, ", tokens);
  for (std::size_t s = 0; s < sequences; ++s)
    KVKEEP_REQUIRE(onward.indptr[s] <= onward.indptr[s + 1], "decoder step: after layer ", sight.layer,
                   " indptr falls from ", onward.indptr[s], " to ", onward.indptr[s + 1], " at sequence ", s,
                   "; allowed ascending numbers");
  for (std::size_t s = 0; s < sequences; ++s) {
    const std::int32_t begin = sight.indptr[s], end = sight.indptr[s + 1];
    std::int32_t before = -1;
    for (auto i = static_cast<std::size_t>(onward.indptr[s]); i < static_cast<std::size_t>(onward.indptr[s + 1]); ++i) {
      const std::int32_t token = onward.tokens[i];
      KVKEEP_REQUIRE(begin < end, "decoder step: after layer ", sight.layer, " token ", token,
                     " continues for sequence ", s, "; allowed none: it has left the step");
      KVKEEP_REQUIRE(token >= begin && token < end, "decoder step: after layer ", sight.layer, " token ", token,
                     " continues for sequence ", s, "; allowed its own, ", begin, " to ", end - 1);
      KVKEEP_REQUIRE(token > before, "decoder step: after layer ", sight.layer, " tokens of sequence ", s,
                     " do not ascend: ", before, " before ", token);
      before = token;
    }
    KVKEEP_REQUIRE(before == -1 || before == end - 1, "decoder step: after layer ", sight.layer, " sequence ", s,
                   " continues without its last token, ", end - 1, "; allowed with it, or with none");
    check_windows(spec, sight, onward, s);
  }
  KVKEEP_REQUIRE(logits != Logits::all || tokens == static_cast<std::int64_t>(sight.positions.size()),
                 "decoder step: after layer ", sight.layer, " ", tokens, " of ", sight.positions.size(),
                 " tokens continue, so the others have no logits; allowed Logits::last or none");
}

void check_step(const io::ModelConfig& config, Device device, Path path, const Step& step,
                std::span<const LayerKv> cache, const Tensor& block_table, const StepOptions& options) {
  check_tokens(config, step);
  check_cache(config.spec, device, path == Path::kernels, cache);
  const bool paged = is_paged(cache);
  check_table(step, paged, block_table);
  check_places(config.spec, step, cache, block_table);
  for (std::int32_t s = 0; s < static_cast<std::int32_t>(step.rows.size()); ++s)
    check_sequence(config.spec, step, cache, block_table, s);
  if (paged) check_pages(config.spec, step, cache, block_table);
  check_mask(config.spec, device, cache, block_table, options.visible);
}

}  // namespace kvkeep::lm::detail
