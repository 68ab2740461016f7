// SPDX-License-Identifier: Apache-2.0
#include "kvlab/decoder.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "attention.h"
#include "kernels.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/row.h"
#include "kvkeep/simd/stored_side.h"
#include "layer_ropes.h"
#include "lazy_memory.h"
#include "narrowing.h"
#include "op_pass.h"
#include "step_check.h"

namespace kvkeep::lm {
namespace {

using detail::Rows;

Rows rows_of(const Tensor& matrix) { return {matrix.const_data_ptr(), matrix.scalar_type(), matrix.stride(0)}; }

void widen_row(const Rows& from, std::int64_t n, float* to) {
  const auto copy = [&](const auto* data) {
    std::transform(data, data + n, to, [](auto x) { return static_cast<float>(x); });
  };
  if (from.dtype == at::kFloat) return copy(static_cast<const float*>(from.data));
  if (from.dtype == at::kHalf) return copy(static_cast<const c10::Half*>(from.data));
  copy(static_cast<const c10::BFloat16*>(from.data));
}

// One linear map of x, and where its outputs go: [n, out].
struct Product {
  const Linear* map;
  float* out;
};

// All products of the same x in one parallel region, split over output rows.
void multiply(std::initializer_list<Product> products, const float* x, std::int64_t n) {
  constexpr std::int64_t kBand = 16;  // rows handed out together
  const std::int64_t in = products.begin()->map->weight.size(1);
  std::int64_t bands = 0;
  for (const Product& product : products) bands += (product.map->weight.size(0) + kBand - 1) / kBand;
  // A thread is worth waking for about 25 us: reading a weight takes 0.2 ns, each multiply-add with it 0.03 ns.
  const double band_ns = static_cast<double>(kBand * in) * (0.2 + 0.03 * static_cast<double>(n));
  const std::int64_t grain = std::max<std::int64_t>(1, static_cast<std::int64_t>(25'000 / band_ns));
  at::parallel_for(0, bands, grain, [&](std::int64_t first, std::int64_t last) {
    std::int64_t band = 0;
    for (const auto& [map, out] : products) {
      const std::int64_t rows = map->weight.size(0), own_bands = (rows + kBand - 1) / kBand;
      const std::int64_t begin = std::max<std::int64_t>(0, first - band) * kBand,
                         end = std::min(rows, (last - band) * kBand);
      band += own_bands;
      // Within a thread, few rows at a time: they stay in the cache while a long prompt passes by.
      constexpr std::int64_t kRowsAtOnce = 4 * kBand;
      for (std::int64_t r = begin; r < end; r += kRowsAtOnce)
        detail::dots(rows_of(map->weight).from(r), std::min(kRowsAtOnce, end - r), in, x, in, n, out + r, rows);
      if (!map->bias.defined() || begin >= end) continue;
      const float* bias = map->bias.const_data_ptr<float>();
      for (std::int64_t i = 0; i < n; ++i)
        for (std::int64_t r = begin; r < end; ++r) out[i * rows + r] += bias[r];
    }
  });
}

void for_tokens(std::int64_t n, std::int64_t work_per_token, const auto& f) {
  const std::int64_t grain = std::max<std::int64_t>(1, 32 * 1024 / std::max<std::int64_t>(1, work_per_token));
  at::parallel_for(0, n, grain, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) f(i);
  });
}

}  // namespace

// Buffers of one step, grown as needed and kept from step to step.
struct Decoder::Workspace {
  std::vector<float> hidden, normed, queries, keys, values, attended, projected, gate, up, cosines, sines, sums, block;
  std::vector<detail::AttentionRow> rows;
};

Decoder::Decoder(io::ModelConfig config, Weights weights)
    : config_(std::move(config)), weights_(std::move(weights)), workspace_(std::make_unique<Workspace>()) {
  config_.check();
  KVKEEP_REQUIRE(weights_.layers.size() == config_.spec.layers.size(), "decoder: weights of ", weights_.layers.size(),
                 " layers for a config of ", config_.num_layers());
}
Decoder::~Decoder() = default;
Decoder::Decoder(Decoder&&) noexcept = default;
Decoder& Decoder::operator=(Decoder&&) noexcept = default;

Decoder Decoder::open(const std::filesystem::path& path, std::optional<Dtype> dtype) {
  io::ModelConfig config = io::ModelConfig::read(path);
  Weights weights = Weights::read(path, config, dtype);
  return {std::move(config), std::move(weights)};
}

void Decoder::to(Device device) {
  weights_ = weights_.to(device);
  path_ = this->device().is_cpu() ? Path::kernels : Path::operators;
}

void Decoder::use(Path path) {
  KVKEEP_REQUIRE(path == Path::operators || device().is_cpu(),
                 "decoder: it has kernels for the CPU only; given weights on ", device().str(),
                 "; allowed operators there");
  path_ = path;
}

namespace {

// llama.cpp rotates quantised keys in the longest runs that fit, from 64 on, and values in runs of 64; heads of other
// sizes not at all. Source: llama-kv-cache.cpp, `build_input_k_rot` and `build_input_v_rot`.
std::int32_t run_of_values(std::int32_t dim) { return dim % 64 == 0 && dim <= kMostRotated ? 64 : 0; }
std::int32_t run_of_keys(std::int32_t dim) {
  std::int32_t run = run_of_values(dim);
  while (run > 0 && dim % (2 * run) == 0) run *= 2;
  return run;
}

/// Layers of zeros on the weights' device, `slots` slots of every KV head each: checked whole, then made one by one.
class CacheMaker {
 public:
  CacheMaker(std::string_view operation, const ModelSpec& spec, at::Device device, std::string_view what, double slots,
             Dtype dtype)
      : spec_(spec), device_(device), dtype_(dtype) {
    KVKEEP_REQUIRE(is_scorable(dtype) || is_blocks(dtype) || dtype == Dtype::i8, operation, ": dtype is ", dtype,
                   "; allowed f32, f16, bf16 and, on the CPU, i8, q8_0, q4_0");
    KVKEEP_REQUIRE_AS(Unsupported, device.is_cpu() || is_scorable(dtype), operation, ": dtype is ", dtype,
                      " off the CPU; allowed f32, f16, bf16");
    for (const std::int32_t dim : {spec.key_dim, spec.value_dim})
      KVKEEP_REQUIRE(dim % numbers_of(dtype) == 0, operation, ": ", dtype, " has blocks of ", numbers_of(dtype),
                     " numbers, and heads have ", dim, "; allowed heads of whole blocks");
    const double bytes = slots * spec.num_layers() * spec.kv_heads * static_cast<double>(bytes_of_slot(spec, dtype));
    if (device.is_cpu()) detail::require_room(operation, what, bytes);
  }

  /// `slots`: the sizes of a layer without that of its vectors.
  [[nodiscard]] LayerCache layer(const Shape& slots) const {
    const auto scales = [&] { return dtype_ == Dtype::i8 ? detail::lazy_zeros(slots, Dtype::f32) : kvkeep::Tensor(); };
    const bool quantised = !is_scorable(dtype_);
    return {.keys = side(slots, spec_.key_dim),
            .values = side(slots, spec_.value_dim),
            .key_scales = scales(),
            .value_scales = scales(),
            .keys_rotated = quantised ? run_of_keys(spec_.key_dim) : 0,
            .values_rotated = quantised ? run_of_values(spec_.value_dim) : 0};
  }

 private:
  [[nodiscard]] kvkeep::Tensor side(const Shape& slots, std::int64_t dim) const {
    std::vector<std::int64_t> sizes(slots.begin(), slots.end());
    sizes.push_back(dim / numbers_of(dtype_));
    if (device_.is_cpu()) return detail::lazy_zeros(sizes, dtype_);
    return at::zeros(sizes, at::TensorOptions(torch_dtype(dtype_)).device(device_));
  }

  const ModelSpec& spec_;
  at::Device device_;
  Dtype dtype_;
};

}  // namespace

std::int64_t bytes_of_slot(const ModelSpec& spec, Dtype dtype) {
  return (spec.key_dim + spec.value_dim) / numbers_of(dtype) * element_size(dtype) +
         (dtype == Dtype::i8 ? 2 * element_size(Dtype::f32) : 0);
}

std::vector<LayerCache> Decoder::make_cache(std::int64_t sequences, std::int64_t capacity, Dtype dtype) const {
  KVKEEP_REQUIRE(sequences >= 1 && capacity >= 1, "make cache: sequences and capacity must be positive; given ",
                 sequences, " and ", capacity);
  const CacheMaker make(
      "make cache", spec(), weights_.embedding.device(),
      text("a cache for ", sequences, sequences == 1 ? " sequence" : " sequences", " of ", capacity, " slots"),
      static_cast<double>(sequences) * static_cast<double>(capacity), dtype);
  std::vector<LayerCache> cache;
  for (std::int32_t l = 0; l < spec().num_layers(); ++l)
    cache.push_back(make.layer({sequences, spec().kv_heads, capacity}));
  return cache;
}

std::vector<LayerKv> Decoder::make_pages(std::int64_t pages, std::int64_t page_size, Dtype dtype,
                                         PageLayout layout) const {
  KVKEEP_REQUIRE(pages >= 1 && page_size >= 1, "make pages: pages and page size must be positive; given ", pages,
                 " and ", page_size);
  const CacheMaker make("make pages", spec(), weights_.embedding.device(),
                        text("a cache of ", pages, " pages of ", page_size, " slots"),
                        static_cast<double>(pages) * static_cast<double>(page_size), dtype);
  const std::int64_t heads = spec().kv_heads;
  std::vector<LayerKv> cache;
  for (std::int32_t l = 0; l < spec().num_layers(); ++l) {
    LayerCache layer =
        make.layer(layout == PageLayout::slot_head ? Shape{pages, page_size, heads} : Shape{pages, heads, page_size});
    cache.emplace_back(PagedKv{std::move(layer.keys), std::move(layer.values), layout, std::move(layer.key_scales),
                               std::move(layer.value_scales), layer.keys_rotated, layer.values_rotated});
  }
  return cache;
}

std::vector<kvkeep::Tensor> Decoder::output_projections() const {
  std::vector<kvkeep::Tensor> all;
  for (const LayerWeights& layer : weights_.layers) all.push_back(layer.o.weight);
  return all;
}

std::int64_t Decoder::bytes_per_step() const {
  std::size_t bytes = weights_.output.nbytes();
  for (const LayerWeights& layer : weights_.layers)
    for (const Linear* map : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down})
      bytes += map->weight.nbytes();
  return static_cast<std::int64_t>(bytes);
}

namespace {

float* sized(std::vector<float>& buffer, std::int64_t n) {
  if (buffer.size() < static_cast<std::size_t>(n)) buffer.resize(static_cast<std::size_t>(n));
  return buffer.data();
}

}  // namespace

// One step through the model.
class Decoder::Pass {
 public:
  Pass(const Decoder& decoder, const Step& step, std::span<const LayerKv> cache, const Tensor& block_table,
       const StepOptions& options)
      : config_(decoder.config_),
        spec_(decoder.config_.spec),
        weights_(decoder.weights_),
        step_(step),
        cache_(cache),
        block_table_(block_table),
        options_(options),
        present_(step),
        ropes_(spec_),
        work_(*decoder.workspace_) {}

  Tensor run() {
    require_memory();
    embed();
    turn_tables();
    for (std::int32_t layer = 0; layer < spec_.num_layers(); ++layer) {
      const LayerWeights& weights = weights_.layers[static_cast<std::size_t>(layer)];
      project_and_store(layer, weights);
      if (options_.on_layer) options_.on_layer(sight(layer));
      attend(layer);
      if (options_.view) options_.view(sight(layer), attended());
      if (options_.on_attended) narrow(layer);
      if (tokens() == 0) break;
      add_product(weights.o, work_.attended.data(), 0, tokens(), weights.attention_after);
      feed_forward(weights);
    }
    if (options_.on_logits) show_logits();
    return logits();
  }

 private:
  // What a long prompt takes beside its cache, before the first buffer grows.
  void require_memory() const {
    constexpr std::int64_t kFew = 1 << 12;  // tokens: not worth a look at what the machine has
    const auto held = static_cast<std::int64_t>(work_.hidden.size()) / config_.hidden;
    if (tokens() <= std::max(held, kFew)) return;
    const std::int64_t floats = 3 * config_.hidden + spec_.query_heads * (spec_.key_dim + spec_.value_dim) +
                                spec_.kv_heads * (spec_.key_dim + spec_.value_dim) +
                                (options_.logits == Logits::all ? config_.vocab : 0);
    detail::require_room("decode", text("a step of ", tokens(), " tokens"),
                         static_cast<double>(tokens() - held) * static_cast<double>(floats) * sizeof(float));
  }

  void embed() {
    float* hidden = sized(work_.hidden, tokens() * config_.hidden);
    sized(work_.normed, tokens() * config_.hidden);
    sized(work_.projected, tokens() * config_.hidden);
    const Rows embedding = rows_of(weights_.embedding);
    const auto scale = static_cast<float>(config_.embedding_scale);
    for_tokens(tokens(), config_.hidden, [&](std::int64_t i) {
      float* row = hidden + i * config_.hidden;
      widen_row(embedding.from(step_.ids[static_cast<std::size_t>(i)]), config_.hidden, row);
      for (std::int64_t j = 0; scale != 1.0F && j < config_.hidden; ++j) row[j] *= scale;
    });
  }

  // cos and sin per token, once for all layers that turn alike.
  void turn_tables() {
    std::int64_t numbers = 0;
    for (const RopeSpec* rope : ropes_.all()) numbers += tokens() * rope->rotary_dim() / 2;
    float* cosines = sized(work_.cosines, numbers);
    float* sines = sized(work_.sines, numbers);
    for (const RopeSpec* rope : ropes_.all()) {
      const std::int64_t pairs = rope->rotary_dim() / 2;
      for_tokens(tokens(), pairs * 32, [&](std::int64_t i) {
        rope_at(*rope, step_.positions[static_cast<std::size_t>(i)], cosines + i * pairs, sines + i * pairs);
      });
      turns_.push_back({rope->style, pairs, cosines, sines});
      cosines += tokens() * pairs;
      sines += tokens() * pairs;
    }
  }

  // With the queries in their current state.
  LayerSight sight(std::int32_t layer) {
    const Tensor queries = at::from_blob(work_.queries.data(), {tokens(), spec_.query_heads, spec_.key_dim},
                                         at::TensorOptions(at::kFloat));
    return {.layer = layer, .queries = queries, .indptr = present_.indptr(), .positions = present_.positions()};
  }

  [[nodiscard]] Attended attended() {
    const auto floats = at::TensorOptions(at::kFloat);
    return {at::from_blob(work_.attended.data(), {tokens(), spec_.query_heads, spec_.value_dim}, floats),
            at::from_blob(work_.sums.data(), {tokens(), spec_.query_heads}, floats)};
  }

  // Everything that is still needed of the tokens that continue moves to the front, so that their rows are adjacent.
  void narrow(std::int32_t layer) {
    std::optional<Onward> onward = detail::who_goes_on(spec_, options_, sight(layer));
    if (!onward) return;
    const auto keep_rows = [&](float* rows, std::int64_t width) {
      for (std::size_t i = 0; i < onward->tokens.size(); ++i)
        if (onward->tokens[i] != static_cast<std::int64_t>(i))
          std::copy_n(rows + onward->tokens[i] * width, width, rows + static_cast<std::int64_t>(i) * width);
    };
    keep_rows(work_.hidden.data(), config_.hidden);
    keep_rows(work_.attended.data(), std::int64_t{spec_.query_heads} * spec_.value_dim);
    for (const Turns& turns : turns_) {
      keep_rows(turns.cosines, turns.pairs);
      keep_rows(turns.sines, turns.pairs);
    }
    present_.narrow(*std::move(onward));
  }

  void normalise(const Tensor& weight) {
    const float* scale = weight.const_data_ptr<float>();
    const std::int64_t n = config_.hidden;
    for_tokens(tokens(), n, [&](std::int64_t i) {
      detail::rms_norm(work_.hidden.data() + i * n, scale, epsilon(), n, work_.normed.data() + i * n);
    });
  }

  // Queries stay before RoPE (for hooks); keys are rotated and stored with the values after the slots in use.
  void project_and_store(std::int32_t layer, const LayerWeights& weights) {
    const std::int64_t heads = spec_.query_heads, kv_heads = spec_.kv_heads, dim = spec_.key_dim;
    float* queries = sized(work_.queries, tokens() * heads * dim);
    float* keys = sized(work_.keys, tokens() * kv_heads * dim);
    float* values = sized(work_.values, tokens() * kv_heads * spec_.value_dim);
    normalise(weights.input_norm);
    multiply({{&weights.q, queries}, {&weights.k, keys}, {&weights.v, values}}, work_.normed.data(), tokens());
    if (config_.qk_norm) {
      normalise_heads(weights.q_norm, queries, heads);
      normalise_heads(weights.k_norm, keys, kv_heads);
    }
    rotate(layer, keys, kv_heads);
    store(layer, keys, values);
  }

  void normalise_heads(const Tensor& weight, float* vectors, std::int64_t heads) {
    const float* scale = weight.const_data_ptr<float>();
    const std::int64_t dim = spec_.key_dim;
    for_tokens(tokens(), heads * dim, [&](std::int64_t i) {
      for (std::int64_t h = 0; h < heads; ++h)
        detail::rms_norm(vectors + (i * heads + h) * dim, scale, epsilon(), dim, vectors + (i * heads + h) * dim);
    });
  }

  void rotate(std::int32_t layer, float* vectors, std::int64_t heads) {
    if (ropes_.of(layer) == detail::LayerRopes::kNone) return;
    const Turns& turns = turns_[static_cast<std::size_t>(ropes_.of(layer))];
    const std::int64_t pairs = turns.pairs, dim = spec_.key_dim;
    for_tokens(tokens(), heads * dim, [&](std::int64_t i) {
      for (std::int64_t h = 0; h < heads; ++h)
        rope_rotate(turns.style, pairs, turns.cosines + i * pairs, turns.sines + i * pairs,
                    vectors + (i * heads + h) * dim);
    });
  }

  void store(std::int32_t layer, const float* keys, const float* values) {
    for (std::int32_t s = 0; s < sequences(); ++s) {
      const std::int64_t first = first_token(s), count = first_token(s + 1) - first;
      for (std::int32_t h = 0; h < spec_.kv_heads; ++h) {
        const Sides row = sides_of(layer, s, h);
        for (std::int64_t i = 0; i < count; ++i) {
          const std::int64_t slot = step_.lengths.at(layer, s, h) + i, vector = (first + i) * spec_.kv_heads + h;
          cpu::store_slot(row.keys, slot, keys + vector * spec_.key_dim);
          cpu::store_slot(row.values, slot, values + vector * spec_.value_dim);
        }
      }
    }
  }

  void attend(std::int32_t layer) {
    work_.rows.clear();
    for (std::int32_t s = 0; s < sequences(); ++s)
      for (std::int32_t h = 0; h < spec_.kv_heads; ++h) {
        const Sides row = sides_of(layer, s, h);
        work_.rows.push_back({.first_token = first_token(s),
                              .new_tokens = first_token(s + 1) - first_token(s),
                              .slots_before = step_.lengths.at(layer, s, h),
                              .begin = present_.begin(s),
                              .kv_head = h,
                              .keys = row.keys,
                              .values = row.values,
                              .visible = visible(layer, s, h)});
      }
    const LayerSpec& kind = spec_.layers[static_cast<std::size_t>(layer)];
    const detail::AttentionShape shape{.query_heads = spec_.query_heads,
                                       .group = spec_.group(),
                                       .key_dim = spec_.key_dim,
                                       .value_dim = spec_.value_dim,
                                       .scale = static_cast<float>(spec_.scale()),
                                       .window = kind.kind == LayerKind::sliding ? kind.window : 0,
                                       .positions = present_.positions().data()};
    rotate(layer, work_.queries.data(), spec_.query_heads);
    if (options_.before_attention) options_.before_attention(sight(layer));
    detail::attend(work_.rows, shape, work_.queries.data(),
                   sized(work_.attended, tokens() * spec_.query_heads * spec_.value_dim),
                   options_.view ? sized(work_.sums, tokens() * spec_.query_heads) : nullptr);
  }

  // hidden[first..last) += norm(map(x)), x [last - first, in]; an undefined norm is none.
  void add_product(const Linear& map, const float* x, std::int64_t first, std::int64_t last, const Tensor& norm) {
    multiply({{&map, work_.projected.data()}}, x, last - first);
    const std::int64_t n = config_.hidden;
    const float* scale = norm.defined() ? norm.const_data_ptr<float>() : nullptr;
    for_tokens(last - first, n, [&](std::int64_t i) {
      float* hidden = work_.hidden.data() + (first + i) * n;
      float* addend = work_.projected.data() + i * n;
      if (scale != nullptr) detail::rms_norm(addend, scale, epsilon(), n, addend);
      for (std::int64_t j = 0; j < n; ++j) hidden[j] += addend[j];
    });
  }

  // A long prompt is processed in blocks, so that its inner activations stay small.
  void feed_forward(const LayerWeights& weights) {
    constexpr std::int64_t kBlock = 256;
    const std::int64_t inner = config_.intermediate, block = std::min(kBlock, tokens());
    float* gate = sized(work_.gate, block * inner);
    float* up = sized(work_.up, block * inner);
    normalise(weights.mlp_norm);
    for (std::int64_t first = 0; first < tokens(); first += kBlock) {
      const std::int64_t last = std::min(first + kBlock, tokens());
      multiply({{&weights.gate, gate}, {&weights.up, up}}, work_.normed.data() + first * config_.hidden, last - first);
      for_tokens(last - first, inner * 8, [&](std::int64_t i) {
        detail::activate_times(config_.activation, gate + i * inner, up + i * inner, inner);
      });
      add_product(weights.down, gate, first, last, weights.mlp_after);
    }
  }

  // out [count, vocab] = logits of the tokens that `token_at` names.
  template <typename TokenAt>
  void logits_of(std::int64_t count, const TokenAt& token_at, float* out) {
    const std::int64_t n = config_.hidden;
    for_tokens(count, n, [&](std::int64_t i) {
      detail::rms_norm(work_.hidden.data() + token_at(i) * n, weights_.final_norm.const_data_ptr<float>(), epsilon(), n,
                       work_.normed.data() + i * n);
    });
    const Linear output{weights_.output, {}};
    if (count > 0) multiply({{&output, out}}, work_.normed.data(), count);
  }

  void show_logits() {
    constexpr std::int64_t kBlock = 128;
    float* block = sized(work_.block, kBlock * config_.vocab);
    for (std::int64_t first = 0; first < tokens(); first += kBlock) {
      const std::int64_t count = std::min(kBlock, tokens() - first);
      logits_of(count, [&](std::int64_t i) { return first + i; }, block);
      options_.on_logits({first, at::from_blob(block, {count, config_.vocab}, at::TensorOptions(at::kFloat))});
    }
  }

  Tensor logits() {
    if (options_.logits == Logits::none) return at::empty({0, config_.vocab}, at::TensorOptions(at::kFloat));
    const bool all = options_.logits == Logits::all;
    const std::vector<std::int32_t> still = present_.still();
    const std::int64_t count = all ? tokens() : static_cast<std::int64_t>(still.size());
    Tensor result = at::empty({count, config_.vocab}, at::TensorOptions(at::kFloat));
    logits_of(
        count, [&](std::int64_t i) { return all ? i : first_token(still[static_cast<std::size_t>(i)] + 1) - 1; },
        result.mutable_data_ptr<float>());
    if (all || count == sequences()) return result;
    Tensor rows =
        at::full({sequences(), config_.vocab}, std::numeric_limits<float>::quiet_NaN(), at::TensorOptions(at::kFloat));
    for (std::int64_t i = 0; i < count; ++i) rows[still[static_cast<std::size_t>(i)]].copy_(result[i]);
    return rows;
  }

  [[nodiscard]] std::int64_t tokens() const { return present_.tokens(); }
  [[nodiscard]] std::int64_t sequences() const { return present_.sequences(); }
  [[nodiscard]] float epsilon() const { return static_cast<float>(config_.rms_eps); }
  [[nodiscard]] std::int64_t first_token(std::int32_t sequence) const { return present_.first_token(sequence); }
  // Where the slots of one row of the cache are.
  struct Sides {
    cpu::StoredSide keys, values;
  };
  [[nodiscard]] Sides sides_of(std::int32_t layer, std::int32_t sequence, std::int32_t head) const {
    const std::int64_t place = step_.rows[static_cast<std::size_t>(sequence)];
    const LayerKv& kv = cache_[static_cast<std::size_t>(layer)];
    const auto of = [&](const auto& address) -> Sides {
      const LayerSides all = kvkeep::sides_of(kv);
      return {
          {address(all.keys), address(all.key_scales), all.keys.dtype(), spec_.key_dim, all.keys_rotated},
          {address(all.values), address(all.value_scales), all.values.dtype(), spec_.value_dim, all.values_rotated}};
    };
    const auto* paged = std::get_if<PagedKv>(&kv);
    if (paged == nullptr) return of([&](const kvkeep::Tensor& side) { return dense_address(side, place, head); });
    const std::int32_t* pages = block_table_.const_data_ptr<std::int32_t>() + place * block_table_.stride(0);
    return of([&](const kvkeep::Tensor& side) { return paged_address(side, paged->layout, head, pages); });
  }
  [[nodiscard]] const std::uint8_t* visible(std::int32_t layer, std::int32_t sequence, std::int32_t head) const {
    if (options_.visible.empty()) return nullptr;
    const Tensor& mask = options_.visible[static_cast<std::size_t>(layer)];
    return mask.const_data_ptr<std::uint8_t>() + step_.rows[static_cast<std::size_t>(sequence)] * mask.stride(0) +
           head * mask.stride(1);
  }

  const io::ModelConfig& config_;
  const ModelSpec& spec_;
  const Weights& weights_;
  const Step& step_;
  std::span<const LayerKv> cache_;
  const Tensor& block_table_;
  const StepOptions& options_;
  detail::Present present_;
  detail::LayerRopes ropes_;
  // Of one RoPE, for the tokens present: [tokens, pairs] each.
  struct Turns {
    RopeStyle style;
    std::int64_t pairs;
    float *cosines, *sines;
  };
  std::vector<Turns> turns_;  // by index in ropes_
  Workspace& work_;
};

Tensor Decoder::forward(const Step& step, std::span<const LayerCache> cache, const StepOptions& options) {
  return forward(step, std::vector<LayerKv>(cache.begin(), cache.end()), Tensor(), options);
}

Tensor Decoder::forward(const Step& step, std::span<const LayerKv> cache, const Tensor& block_table,
                        const StepOptions& options) {
  detail::check_step(config_, device(), path_, step, cache, block_table, options);
  if (path_ == Path::operators) return detail::run_with_operators(config_, weights_, step, cache, block_table, options);
  return Pass(*this, step, cache, block_table, options).run();
}

std::vector<std::int32_t> argmax(const Tensor& logits) {
  KVKEEP_REQUIRE(logits.dim() == 2 && logits.size(1) >= 1 && logits.scalar_type() == at::kFloat,
                 "argmax: logits must be f32 [n, vocab]; given ", dtype_of(logits.scalar_type()), " ", logits.sizes());
  const Tensor rows = logits.cpu().contiguous();
  std::vector<std::int32_t> best;
  for (std::int64_t i = 0; i < rows.size(0); ++i) {
    const float* row = rows.const_data_ptr<float>() + i * rows.size(1);
    std::int64_t top = 0;
    for (std::int64_t j = 0; j < rows.size(1); ++j) {
      KVKEEP_REQUIRE(!std::isnan(row[j]), "argmax: logit ", j, " of row ", i,
                     " is not a number; allowed numbers (are the weights damaged?)");
      if (row[j] > row[top]) top = j;
    }
    best.push_back(static_cast<std::int32_t>(top));
  }
  return best;
}

}  // namespace kvkeep::lm
