// SPDX-License-Identifier: Apache-2.0
#include "kvlab/weights.h"

#include <ATen/ops/empty.h>

#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "checkpoint.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/io/safetensors.h"
#include "kvlab/memory_left.h"

namespace kvkeep::lm {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using detail::Checkpoint;

std::string layer_prefix(std::int32_t layer) { return text("model.layers.", layer, "."); }

// The tensors of one linear map by its name in the checkpoint.
struct LinearSpec {
  std::string name;
  std::int64_t out, in;
  bool bias;
};

std::vector<LinearSpec> linears_of(const io::ModelConfig& config, std::int32_t layer) {
  const std::int64_t query = std::int64_t{config.spec.query_heads} * config.spec.key_dim,
                     kv = std::int64_t{config.spec.kv_heads} * config.spec.key_dim;
  const std::string attention = layer_prefix(layer) + "self_attn.", mlp = layer_prefix(layer) + "mlp.";
  return {{attention + "q_proj", query, config.hidden, config.qkv_bias},
          {attention + "k_proj", kv, config.hidden, config.qkv_bias},
          {attention + "v_proj", kv, config.hidden, config.qkv_bias},
          {attention + "o_proj", config.hidden, query, config.output_bias},
          {mlp + "gate_proj", config.intermediate, config.hidden, config.mlp_bias},
          {mlp + "up_proj", config.intermediate, config.hidden, config.mlp_bias},
          {mlp + "down_proj", config.hidden, config.intermediate, config.mlp_bias}};
}

Tensor widened(const Tensor& tensor) { return tensor.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true); }

Tensor norm_from(const Checkpoint& checkpoint, const TensorSpec& norm) {
  return widened(checkpoint.tensor(norm)).add_(checkpoint.norms_above_stored());
}

// Where attention's result has a norm of its own, that one has the name.
std::string mlp_norm_of(const io::ModelConfig& config) {
  return config.post_norms ? "pre_feedforward_layernorm" : "post_attention_layernorm";
}

Linear linear_from(const Checkpoint& checkpoint, const LinearSpec& linear, std::optional<Dtype> dtype) {
  Linear loaded{checkpoint.tensor({linear.name + ".weight", {linear.out, linear.in}}, dtype), {}};
  if (linear.bias) loaded.bias = widened(checkpoint.tensor({linear.name + ".bias", {linear.out}}));
  return loaded;
}

LayerWeights layer_from(const Checkpoint& checkpoint, const io::ModelConfig& config, std::int32_t layer,
                        std::optional<Dtype> dtype) {
  const auto norm = [&](const std::string& name, std::int64_t size) {
    return norm_from(checkpoint, {layer_prefix(layer) + name + ".weight", {size}});
  };
  const std::vector<LinearSpec> linears = linears_of(config, layer);
  LayerWeights weights;
  Linear* const targets[] = {&weights.q, &weights.k, &weights.v, &weights.o, &weights.gate, &weights.up, &weights.down};
  for (std::size_t i = 0; i < linears.size(); ++i) *targets[i] = linear_from(checkpoint, linears[i], dtype);
  weights.input_norm = norm("input_layernorm", config.hidden);
  weights.mlp_norm = norm(mlp_norm_of(config), config.hidden);
  if (config.qk_norm) {
    weights.q_norm = norm("self_attn.q_norm", config.spec.key_dim);
    weights.k_norm = norm("self_attn.k_norm", config.spec.key_dim);
  }
  if (config.post_norms) {
    weights.attention_after = norm("post_attention_layernorm", config.hidden);
    weights.mlp_after = norm("post_feedforward_layernorm", config.hidden);
  }
  return weights;
}

std::string dtype_name(Dtype dtype) {
  return dtype == Dtype::f32 ? "float32" : dtype == Dtype::f16 ? "float16" : "bfloat16";
}

// The standard library does not fix the bits of its distributions, so the normal numbers are made here.
class Normal {
 public:
  explicit Normal(std::uint64_t seed) : bits_(seed) {}
  float operator()() {
    if (spare_) return *std::exchange(spare_, std::nullopt);
    const double radius = std::sqrt(-2 * std::log(uniform())), angle = 6.283185307179586 * uniform();
    spare_ = static_cast<float>(radius * std::sin(angle));
    return static_cast<float>(radius * std::cos(angle));
  }

 private:
  double uniform() { return (static_cast<double>(bits_() >> 11) + 0.5) * 0x1p-53; }
  std::mt19937_64 bits_;
  std::optional<float> spare_;
};

Tensor random_tensor(const TensorSpec& spec, bool norms_less_one, Normal& normal, Dtype dtype) {
  Tensor values = at::empty(spec.shape, at::TensorOptions(at::kFloat));
  const bool is_norm = spec.name.ends_with("norm.weight"), is_bias = spec.name.ends_with(".bias");
  const float mean = is_norm && !norms_less_one ? 1.0F : 0.0F;
  const float deviation = is_norm || is_bias ? 0.1F : 1.0F / std::sqrt(static_cast<float>(spec.shape.back()));
  float* data = values.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < values.numel(); ++i) data[i] = mean + deviation * normal();
  return values.to(torch_dtype(dtype));
}

}  // namespace

std::vector<TensorSpec> checkpoint_tensors(const io::ModelConfig& config) {
  std::vector<TensorSpec> tensors{{"model.embed_tokens.weight", {config.vocab, config.hidden}}};
  for (std::int32_t layer = 0; layer < config.num_layers(); ++layer) {
    const std::string prefix = layer_prefix(layer);
    tensors.push_back({prefix + "input_layernorm.weight", {config.hidden}});
    for (const LinearSpec& linear : linears_of(config, layer)) {
      tensors.push_back({linear.name + ".weight", {linear.out, linear.in}});
      if (linear.bias) tensors.push_back({linear.name + ".bias", {linear.out}});
    }
    if (config.qk_norm) {
      tensors.push_back({prefix + "self_attn.q_norm.weight", {config.spec.key_dim}});
      tensors.push_back({prefix + "self_attn.k_norm.weight", {config.spec.key_dim}});
    }
    tensors.push_back({prefix + mlp_norm_of(config) + ".weight", {config.hidden}});
    if (config.post_norms)
      for (const char* name : {"post_attention_layernorm.weight", "post_feedforward_layernorm.weight"})
        tensors.push_back({prefix + name, {config.hidden}});
  }
  tensors.push_back({"model.norm.weight", {config.hidden}});
  if (!config.tied) tensors.push_back({"lm_head.weight", {config.vocab, config.hidden}});
  return tensors;
}

Weights Weights::read(const fs::path& path, const io::ModelConfig& config, std::optional<Dtype> dtype) {
  config.check();
  KVKEEP_REQUIRE(!dtype || is_scorable(*dtype), "read weights: dtype is ", *dtype, "; allowed f32, f16, bf16");
  const std::unique_ptr<const Checkpoint> checkpoint = Checkpoint::open(path, config);
  for (const TensorSpec& tensor : checkpoint_tensors(config)) checkpoint->check(tensor);  // all checks before any work
  double bytes = 0;
  for (const TensorSpec& tensor : checkpoint_tensors(config)) bytes += checkpoint->copied_bytes(tensor, dtype);
  lm::require_memory("read weights", text("what is widened or rounded of ", path.string()), bytes,
                     "a smaller model, or weights of 16 bits");
  Weights weights;
  weights.embedding = checkpoint->tensor({"model.embed_tokens.weight", {config.vocab, config.hidden}}, dtype);
  for (std::int32_t layer = 0; layer < config.num_layers(); ++layer)
    weights.layers.push_back(layer_from(*checkpoint, config, layer, dtype));
  weights.final_norm = norm_from(*checkpoint, {"model.norm.weight", {config.hidden}});
  weights.output =
      config.tied ? weights.embedding : checkpoint->tensor({"lm_head.weight", {config.vocab, config.hidden}}, dtype);
  return weights;
}

Weights Weights::to(Device device) const {
  const auto move = [&](Tensor& tensor) {
    if (tensor.defined()) tensor = tensor.to(torch_device(device));
  };
  Weights moved = *this;
  try {
    move(moved.embedding);
    move(moved.final_norm);
    if (output.is_same(embedding)) {
      moved.output = moved.embedding;
    } else {
      move(moved.output);
    }
    for (LayerWeights& layer : moved.layers) {
      for (Tensor* vector :
           {&layer.input_norm, &layer.q_norm, &layer.k_norm, &layer.attention_after, &layer.mlp_norm, &layer.mlp_after})
        move(*vector);
      for (Linear* map : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
        move(map->weight);
        move(map->bias);
      }
    }
  } catch (const c10::Error& error) {
    const std::string why = error.what_without_backtrace();
    refuse<DeviceError>("weights: LibTorch cannot put them on ", device.str(), " (", why.substr(0, why.find('\n')),
                        "); allowed a device that it has, with room for them");
  }
  return moved;
}

void write_random_checkpoint(const fs::path& folder, const io::ModelConfig& config, std::uint64_t seed, Dtype dtype,
                             std::int32_t shards) {
  config.check();
  KVKEEP_REQUIRE(is_scorable(dtype), "write random checkpoint: dtype is ", dtype, "; allowed f32, f16, bf16");
  const std::vector<TensorSpec> tensors = checkpoint_tensors(config);
  KVKEEP_REQUIRE(shards >= 1 && static_cast<std::size_t>(shards) <= tensors.size(),
                 "write random checkpoint: shards is ", shards, "; allowed 1 to ", tensors.size());
  fs::create_directories(folder);
  io::write_text_atomically(folder / "config.json", config.json(dtype_name(dtype)));
  if (!config.end_tokens.empty())
    io::write_text_atomically(folder / "generation_config.json",
                              Json{{"eos_token_id", config.end_tokens}}.dump(1) + "\n");

  Normal normal(seed);
  Json index{{"metadata", Json::object()}, {"weight_map", Json::object()}};
  const auto count = static_cast<std::size_t>(shards);
  const auto numbered = [](std::size_t n) { return text(n < 10 ? "0000" : "000", n); };
  for (std::size_t shard = 0; shard < count; ++shard) {
    const std::string file = shards == 1 ? "model.safetensors"
                                         : text("model-", numbered(shard + 1), "-of-", numbered(count), ".safetensors");
    std::vector<std::pair<std::string, kvkeep::Tensor>> part;
    for (std::size_t i = shard * tensors.size() / count; i < (shard + 1) * tensors.size() / count; ++i) {
      part.emplace_back(tensors[i].name, random_tensor(tensors[i], config.post_norms, normal, dtype));
      index["weight_map"][tensors[i].name] = file;
    }
    io::write_safetensors(folder / file, part, {{"format", "pt"}});
  }
  if (shards > 1) io::write_text_atomically(folder / "model.safetensors.index.json", index.dump(1) + "\n");
}

}  // namespace kvkeep::lm
