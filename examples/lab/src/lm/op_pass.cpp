// SPDX-License-Identifier: Apache-2.0
#include "op_pass.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/List.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/index.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "kvkeep/core/model_spec.h"
#include "layer_ropes.h"
#include "narrowing.h"

namespace kvkeep::lm::detail {
namespace {

constexpr at::ScalarType kIndex = c10::ScalarType::Long;
using Index = c10::List<std::optional<Tensor>>;

// Numbers that the host computes for a step. They travel in one copy, from page-locked memory if that matters.
class Parcel {
 public:
  // `to` will be i64 [shape], number(i) at flat index i.
  template <class Number>
  void add(Tensor& to, std::vector<std::int64_t> shape, const Number& number) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    parts_.push_back({&to, std::move(shape), static_cast<std::int64_t>(numbers_.size()), count});
    for (std::int64_t i = 0; i < count; ++i) numbers_.push_back(number(i));
  }

  // On the CPU the tensors are views of this object.
  void send(at::Device device) {
    Tensor all =
        at::from_blob(numbers_.data(), {static_cast<std::int64_t>(numbers_.size())}, at::TensorOptions(kIndex));
    if (device.is_cuda()) all = all.pin_memory();
    all = all.to(device, kIndex, /*non_blocking=*/device.is_cuda());
    for (const Part& part : parts_) *part.to = all.narrow(0, part.first, part.count).view(part.shape);
  }

 private:
  struct Part {
    Tensor* to;
    std::vector<std::int64_t> shape;
    std::int64_t first, count;
  };
  std::vector<std::int64_t> numbers_;
  std::vector<Part> parts_;
};

class OpPass {
 public:
  OpPass(const io::ModelConfig& config, const Weights& weights, const Step& step, std::span<const LayerKv> cache,
         const Tensor& block_table, const StepOptions& options)
      : config_(config),
        spec_(config.spec),
        weights_(weights),
        step_(step),
        cache_(cache),
        options_(options),
        device_(weights.embedding.device()),
        present_(step),
        ropes_(spec_),
        turns_(ropes_.all().size()) {
    if (const auto* pages = std::get_if<PagedKv>(&cache.front()))
      page_size_ = pages->keys.size(pages->layout == PageLayout::slot_head ? 1 : 2);
    gather_numbers(block_table);
  }

  Tensor run() {
    Tensor hidden = weights_.embedding.index_select(0, ids_).to(at::kFloat).mul_(config_.embedding_scale);
    for (std::int32_t layer = 0; layer < spec_.num_layers(); ++layer) {
      const LayerWeights& weights = weights_.layers[static_cast<std::size_t>(layer)];
      const Tensor normed = normalised(hidden, weights.input_norm);
      Tensor queries = product(weights.q, normed).view({tokens(), spec_.query_heads, spec_.key_dim});
      Tensor keys = product(weights.k, normed).view({tokens(), spec_.kv_heads, spec_.key_dim});
      const Tensor values = product(weights.v, normed).view({tokens(), spec_.kv_heads, spec_.value_dim});
      if (config_.qk_norm) {
        queries = normalised(queries, weights.q_norm);
        keys = normalised(keys, weights.k_norm);
      }
      store(layer, rotated(layer, keys), values);
      if (options_.on_layer) options_.on_layer(sight(layer, queries));
      queries = rotated(layer, queries);
      if (options_.before_attention) options_.before_attention(sight(layer, queries));
      Tensor sums;
      Tensor attended = attend(layer, queries * spec_.scale(), options_.view ? &sums : nullptr);
      if (options_.view) {
        attended = attended.contiguous();
        options_.view(sight(layer, queries), {attended.view({tokens(), spec_.query_heads, spec_.value_dim}), sums});
      }
      if (options_.on_attended) narrow(layer, queries, hidden, attended);
      if (tokens() == 0) break;
      hidden.add_(after(product(weights.o, attended), weights.attention_after));
      const Tensor inner = normalised(hidden, weights.mlp_norm);
      const Tensor gate = activated(product(weights.gate, inner)).mul_(product(weights.up, inner));
      hidden.add_(after(product(weights.down, gate), weights.mlp_after));
    }
    if (options_.on_logits) show_logits(hidden);
    return logits(hidden);
  }

 private:
  // ---- What the host knows

  // Slots in use before the step, over the heads of a sequence in one layer.
  struct Extent {
    std::int64_t shortest, longest;
  };
  [[nodiscard]] Extent extent(std::int32_t layer, std::int32_t sequence) const {
    Extent found{std::numeric_limits<std::int64_t>::max(), 0};
    for (std::int32_t head = 0; head < spec_.kv_heads; ++head) {
      const std::int64_t length = step_.lengths.at(layer, sequence, head);
      found = {std::min(found.shortest, length), std::max(found.longest, length)};
    }
    return found;
  }
  [[nodiscard]] std::int64_t tokens() const { return present_.tokens(); }
  [[nodiscard]] std::int64_t sequences() const { return present_.sequences(); }
  [[nodiscard]] std::int64_t first_token(std::int64_t sequence) const { return present_.first_token(sequence); }
  [[nodiscard]] std::int64_t added(std::int64_t sequence) const { return present_.tokens_of(sequence); }
  [[nodiscard]] LayerSight sight(std::int32_t layer, const Tensor& queries) const {
    return {.layer = layer, .queries = queries, .indptr = present_.indptr(), .positions = present_.positions()};
  }

  void gather_numbers(const Tensor& block_table) {
    const std::vector<std::int64_t> owners = owners_of_tokens();
    const auto owner_of = [&](std::int64_t token) { return owners[static_cast<std::size_t>(token)]; };
    const auto place_of = [&](std::int64_t sequence) { return step_.rows[static_cast<std::size_t>(sequence)]; };
    numbers_.add(ids_, {tokens()}, [&](std::int64_t i) { return step_.ids[static_cast<std::size_t>(i)]; });
    numbers_.add(owners_, {tokens()}, owner_of);
    add_numbers_in_order(numbers_, 0);
    numbers_.add(heads_, {1, spec_.kv_heads}, [](std::int64_t h) { return h; });
    lengths_.resize(spec_.layers.size());
    for (std::int32_t layer = 0; layer < spec_.num_layers(); ++layer) {
      for (std::int32_t s = 0; s < sequences(); ++s) slots_ = std::max(slots_, extent(layer, s).longest + added(s));
      numbers_.add(lengths_[static_cast<std::size_t>(layer)], {sequences(), spec_.kv_heads}, [&](std::int64_t i) {
        return step_.lengths.at(layer, static_cast<std::int32_t>(i / spec_.kv_heads),
                                static_cast<std::int32_t>(i % spec_.kv_heads));
      });
    }
    if (page_size_ == 0) {
      numbers_.add(places_, {tokens(), 1}, [&](std::int64_t i) { return place_of(owner_of(i)); });
    } else {
      const std::int64_t pages =
          (slots_ + page_size_ - 1) /
          page_size_;  // of the longest row; shorter ones are padded, and the padding is never looked up
      numbers_.add(pages_, {sequences(), pages}, [&](std::int64_t i) -> std::int64_t {
        const std::int64_t s = i / pages, page = i % pages;
        if (page >= block_table.size(1)) return 0;
        return block_table.const_data_ptr<std::int32_t>()[place_of(s) * block_table.stride(0) + page];
      });
    }
    // cos and sin, computed in double on the host, travel as one 64-bit number.
    for (std::size_t r = 0; r < turns_.size(); ++r) {
      const RopeSpec& rope = *ropes_.all()[r];
      const auto pairs = static_cast<std::int64_t>(rope.inv_freq.size());
      numbers_.add(turns_[r], {tokens(), pairs}, [&](std::int64_t i) {
        const RopeTurn turn = rope_turn(step_.positions[static_cast<std::size_t>(i / pairs)],
                                        rope.inv_freq[static_cast<std::size_t>(i % pairs)], rope.attention_scaling);
        return std::bit_cast<std::int64_t>(std::array{turn.cosine, turn.sine});
      });
    }
    numbers_.send(device_);
    for (Tensor& turns : turns_) turns = turns.view(at::kFloat).view({tokens(), 1, turns.size(1), 2});
    every_slot_ = at::arange(slots_, at::TensorOptions(kIndex).device(device_));
  }

  [[nodiscard]] std::vector<std::int64_t> owners_of_tokens() const {
    std::vector<std::int64_t> owners;
    for (std::int64_t s = 0; s < sequences(); ++s) owners.insert(owners.end(), static_cast<std::size_t>(added(s)), s);
    return owners;
  }

  // Numbers that depend on the order of the tokens present, for the layers from `first_layer` on.
  void add_numbers_in_order(Parcel& numbers, std::int32_t first_layer) {
    const std::vector<std::int64_t> owners = owners_of_tokens();
    const auto ordinal = [&](std::int64_t token) {
      return token - first_token(owners[static_cast<std::size_t>(token)]);
    };
    const std::vector<std::int32_t> still = present_.still();
    const auto sequences_still = static_cast<std::int64_t>(still.size());
    numbers.add(ordinals_, {tokens(), 1}, ordinal);
    numbers.add(still_, {sequences_still}, [&](std::int64_t i) { return still[static_cast<std::size_t>(i)]; });
    numbers.add(last_, {sequences_still},
                [&](std::int64_t i) { return first_token(still[static_cast<std::size_t>(i)] + 1) - 1; });
    offsets_.resize(spec_.layers.size());
    for (std::int32_t layer = first_layer; layer < spec_.num_layers(); ++layer)
      if (window(layer) > 0)
        numbers.add(offsets_[static_cast<std::size_t>(layer)], {tokens(), 1},
                    [&](std::int64_t i) { return first_seen(layer, owners[static_cast<std::size_t>(i)], ordinal(i)); });
  }

  // The hook answers on the host: one more parcel is sent, and the rows of the tokens that continue are gathered.
  void narrow(std::int32_t layer, const Tensor& queries, Tensor& hidden, Tensor& attended) {
    std::optional<Onward> onward = who_goes_on(spec_, options_, sight(layer, queries));
    if (!onward) return;
    Parcel numbers;
    Tensor kept;
    numbers.add(kept, {static_cast<std::int64_t>(onward->tokens.size())},
                [&](std::int64_t i) { return onward->tokens[static_cast<std::size_t>(i)]; });
    present_.narrow(*std::move(onward));
    if (tokens() == 0) return;
    add_numbers_in_order(numbers, layer + 1);
    numbers.send(device_);
    for (Tensor* rows : {&hidden, &attended, &owners_}) *rows = rows->index_select(0, kept);
    for (Tensor& turns : turns_) turns = turns.index_select(0, kept);
    if (page_size_ == 0) places_ = places_.index_select(0, kept);
    new_slots_ = Tensor();
    narrowed_ = std::move(numbers);
  }

  [[nodiscard]] std::int64_t window(std::int32_t layer) const {
    const LayerSpec& kind = spec_.layers[static_cast<std::size_t>(layer)];
    return kind.kind == LayerKind::sliding ? kind.window : 0;
  }

  // The first slot that token i of a sequence sees in a sliding layer, counted from the sequence's first new token:
  // below 0 for old slots, which hold the positions just before the step.
  [[nodiscard]] std::int64_t first_seen(std::int32_t layer, std::int64_t sequence, std::int64_t i) const {
    const std::int32_t* positions = present_.positions().data() + first_token(sequence);
    const std::int64_t oldest = positions[i] - window(layer) + 1, begin = present_.begin(sequence);
    return oldest > begin ? std::lower_bound(positions, positions + i, oldest) - positions : oldest - begin;
  }

  // ---- Products, norms, rotations

  [[nodiscard]] static Tensor product(const Linear& map, const Tensor& x) {
    return at::linear(x, map.weight.to(at::kFloat),
                      map.bias.defined() ? std::optional<Tensor>(map.bias) : std::nullopt);
  }

  [[nodiscard]] Tensor normalised(const Tensor& x, const Tensor& weight) const {
    return at::rms_norm(x, weight.sizes(), weight, config_.rms_eps);
  }

  // An undefined norm is none.
  [[nodiscard]] Tensor after(const Tensor& x, const Tensor& norm) const {
    return norm.defined() ? normalised(x, norm) : x;
  }

  [[nodiscard]] Tensor activated(const Tensor& x) const {
    return config_.activation == io::Activation::silu ? at::silu(x) : at::gelu(x, "tanh");
  }

  // x [n, heads, D], every token turned by its position.
  [[nodiscard]] Tensor rotated(std::int32_t layer, const Tensor& x) const {
    if (ropes_.of(layer) == LayerRopes::kNone) return x;
    const auto own = static_cast<std::size_t>(ropes_.of(layer));
    const Tensor& turns = turns_[own];
    const std::int64_t pairs = turns.size(2), rest = x.size(2) - 2 * pairs;
    const Tensor cosines = turns.select(3, 0), sines = turns.select(3, 1), turning = x.narrow(2, 0, 2 * pairs);
    const bool half = ropes_.all()[own]->style == RopeStyle::half;
    const Tensor split = half ? turning.reshape({x.size(0), x.size(1), 2, pairs}).transpose(2, 3)
                              : turning.reshape({x.size(0), x.size(1), pairs, 2});
    const Tensor a = split.select(3, 0), b = split.select(3, 1);
    const Tensor first = a * cosines - b * sines, second = b * cosines + a * sines;
    const Tensor turned = half ? at::cat({first, second}, 2) : at::stack({first, second}, 3).flatten(2);
    return rest == 0 ? turned : at::cat({turned, x.narrow(2, 2 * pairs, rest)}, 2);
  }

  // ---- The cache

  // Writes keys and values [n, Hkv, D] after each row's slots in use.
  void store(std::int32_t layer, const Tensor& keys, const Tensor& values) {
    if (!new_slots_.defined() || step_.lengths.layer_stride != 0) {
      new_slots_ = lengths_[static_cast<std::size_t>(layer)].index_select(0, owners_) + ordinals_;
      if (page_size_ > 0) {
        new_pages_ = at::index(pages_, Index({owners_.unsqueeze(1), new_slots_.div(page_size_, "floor")}));
        new_slots_ = new_slots_.remainder(page_size_);
      }
    }
    const auto put = [&](const auto& kv, const Index& at) {
      const Tensor to_keys = kv.keys, to_values = kv.values;
      to_keys.index_put_(at, keys.to(to_keys.scalar_type()));
      to_values.index_put_(at, values.to(to_values.scalar_type()));
    };
    const LayerKv& kv = cache_[static_cast<std::size_t>(layer)];
    if (const auto* dense = std::get_if<DenseKv>(&kv)) return put(*dense, Index({places_, heads_, new_slots_}));
    const auto& paged = std::get<PagedKv>(kv);
    if (paged.layout == PageLayout::slot_head) return put(paged, Index({new_pages_, new_slots_, heads_}));
    put(paged, Index({new_pages_, heads_, new_slots_}));
  }

  // The first `slots` slots of a sequence as f32 [Hkv, slots, D], out of one side of a layer: a view of a dense f32
  // cache, else a copy.
  [[nodiscard]] Tensor rows_of(const Tensor& side, const PagedKv* paged, std::int64_t sequence,
                               std::int64_t slots) const {
    if (paged == nullptr)
      return side.select(0, step_.rows[static_cast<std::size_t>(sequence)]).narrow(1, 0, slots).to(at::kFloat);
    const Tensor own =
        side.index_select(0, pages_.select(0, sequence).narrow(0, 0, (slots + page_size_ - 1) / page_size_));
    const Tensor rows =
        paged->layout == PageLayout::slot_head ? own.flatten(0, 1).transpose(0, 1) : own.transpose(0, 1).flatten(1, 2);
    return rows.narrow(1, 0, slots).to(at::kFloat);
  }

  // ---- Attention

  // [n, Hq * Dv] from queries [n, Hq, D], rotated and scaled; and, if asked for, the log-sum-exps [n, Hq] of their
  // logits.
  [[nodiscard]] Tensor attend(std::int32_t layer, const Tensor& queries, Tensor* log_sum_exp) const {
    std::vector<Tensor> parts, sums;
    for (const std::int32_t s : present_.still())
      attend_sequence(layer, s, queries.narrow(0, first_token(s), added(s)), parts,
                      log_sum_exp == nullptr ? nullptr : &sums);
    if (log_sum_exp != nullptr) *log_sum_exp = at::cat(sums);
    return at::cat(parts);
  }

  void attend_sequence(std::int32_t layer, std::int32_t sequence, const Tensor& queries, std::vector<Tensor>& parts,
                       std::vector<Tensor>* sums) const {
    const LayerKv& kv = cache_[static_cast<std::size_t>(layer)];
    const auto* dense = std::get_if<DenseKv>(&kv);
    const auto* paged = std::get_if<PagedKv>(&kv);
    const auto [shortest, longest] = extent(layer, sequence);
    const std::int64_t tokens = added(sequence), slots = longest + tokens, heads = spec_.kv_heads,
                       group = spec_.group();
    const Tensor keys = rows_of(dense != nullptr ? dense->keys : paged->keys, paged, sequence, slots);
    Tensor values = rows_of(dense != nullptr ? dense->values : paged->values, paged, sequence, slots);
    // [Hkv, slots]: the slot of new token i is i, the newest old slot is -1
    const Tensor ages =
        every_slot_.narrow(0, 0, slots) - lengths_[static_cast<std::size_t>(layer)][sequence].unsqueeze(1);
    // Memory after a shorter row may hold anything: a weight of 0 does not help against a NaN there.
    if (shortest < longest) values = values.masked_fill(ages.ge(tokens).unsqueeze(2), 0);

    constexpr std::int64_t kMostLogits = std::int64_t{32} << 20;
    const std::int64_t block = std::clamp<std::int64_t>(kMostLogits / (spec_.query_heads * slots), 1, tokens);
    for (std::int64_t i = 0; i < tokens; i += block) {
      const std::int64_t count = std::min(block, tokens - i);
      const std::int64_t begin = window(layer) == 0
                                     ? 0
                                     : std::max<std::int64_t>(0, shortest + first_seen(layer, sequence, i)),
                         width = longest + i + count - begin;
      // Token after token, and the heads of a group within: one product for all that read the same rows.
      const Tensor asking = queries.narrow(0, i, count)
                                .view({count, heads, group, spec_.key_dim})
                                .transpose(0, 1)
                                .reshape({heads, count * group, spec_.key_dim});
      Tensor logits = at::bmm(asking, keys.narrow(1, begin, width).transpose(1, 2));
      if (count > 1 || shortest < longest || !options_.visible.empty())
        logits.view({heads, count, group, width})
            .masked_fill_(hidden(layer, sequence, i, count, ages.narrow(1, begin, width), begin).unsqueeze(2),
                          -std::numeric_limits<float>::infinity());
      if (sums != nullptr)
        sums->push_back(
            at::logsumexp(logits, {2}).view({heads, count, group}).transpose(0, 1).reshape({count, spec_.query_heads}));
      const Tensor seen = at::bmm(at::softmax(logits, 2), values.narrow(1, begin, width));
      parts.push_back(seen.view({heads, count, group * spec_.value_dim})
                          .transpose(0, 1)
                          .reshape({count, spec_.query_heads * spec_.value_dim}));
    }
  }

  // bool [Hkv, count, slots] what tokens i.. of a sequence may not see: the future, slots outside the window, those
  // that the caller's mask hides. `begin`: the first slot of `ages`.
  [[nodiscard]] Tensor hidden(std::int32_t layer, std::int32_t sequence, std::int64_t i, std::int64_t count,
                              const Tensor& ages, std::int64_t begin) const {
    const auto of_tokens = [&](const Tensor& numbers) { return numbers.narrow(0, first_token(sequence) + i, count); };
    const Tensor slots = ages.unsqueeze(1);
    Tensor hide = slots.gt(of_tokens(ordinals_));
    if (window(layer) > 0) hide.logical_or_(slots.lt(of_tokens(offsets_[static_cast<std::size_t>(layer)])));
    if (options_.visible.empty()) return hide;
    const Tensor mask = options_.visible[static_cast<std::size_t>(layer)]
                            .select(0, step_.rows[static_cast<std::size_t>(sequence)])
                            .narrow(1, begin, ages.size(1));
    return hide.logical_or_(mask.eq(0).logical_and_(ages.lt(0)).unsqueeze(1));
  }

  void show_logits(const Tensor& hidden) const {
    constexpr std::int64_t kBlock = 128;
    for (std::int64_t first = 0; first < tokens(); first += kBlock) {
      const Tensor rows = hidden.narrow(0, first, std::min(kBlock, tokens() - first));
      options_.on_logits({first, product({weights_.output, {}}, normalised(rows, weights_.final_norm))});
    }
  }

  [[nodiscard]] Tensor logits(const Tensor& hidden) const {
    if (options_.logits == Logits::none) return at::empty({0, config_.vocab}, hidden.options());
    const auto of = [&](const Tensor& asked) {
      return product({weights_.output, {}}, normalised(asked, weights_.final_norm));
    };
    if (options_.logits == Logits::all) return of(hidden);
    if (still_.size(0) == sequences() && tokens() > 0) return of(hidden.index_select(0, last_));
    Tensor rows = at::full({sequences(), config_.vocab}, std::numeric_limits<float>::quiet_NaN(), hidden.options());
    return tokens() > 0 ? rows.index_copy_(0, still_, of(hidden.index_select(0, last_))) : rows;
  }

  const io::ModelConfig& config_;
  const ModelSpec& spec_;
  const Weights& weights_;
  const Step& step_;
  std::span<const LayerKv> cache_;
  const StepOptions& options_;
  at::Device device_;
  Present present_;
  LayerRopes ropes_;
  std::vector<Tensor> turns_;   // f32 [n, 1, pairs, 2] cos and sin, by index in ropes_
  std::int64_t page_size_ = 0;  // 0: dense
  std::int64_t slots_ = 0;      // of the longest row, new ones included

  Parcel numbers_, narrowed_;    // hold what follows if the device is the CPU
  Tensor ids_, owners_;          // i64 [n] ids, their sequences
  Tensor still_, last_;          // i64 [sequences that have not left] which they are, their last tokens
  Tensor ordinals_, places_;     // i64 [n, 1] place of a token among its sequence's, of its sequence in a dense cache
  Tensor heads_, pages_;         // i64 [1, Hkv] 0, 1, ...; [sequences, pages]
  std::vector<Tensor> lengths_;  // i64 [layers] [sequences, Hkv]
  std::vector<Tensor> offsets_;  // i64 [layers] [n, 1] first_seen(); undefined if nothing slides
  Tensor every_slot_;            // i64 [slots] 0, 1, ...
  Tensor new_slots_,
      new_pages_;  // i64 [n, Hkv] where the step's tokens go in the current layer; slots within their pages
};

}  // namespace

Tensor run_with_operators(const io::ModelConfig& config, const Weights& weights, const Step& step,
                          std::span<const LayerKv> cache, const Tensor& block_table, const StepOptions& options) {
  return OpPass(config, weights, step, cache, block_table, options).run();
}

}  // namespace kvkeep::lm::detail
