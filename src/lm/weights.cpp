#include "kvkeep/lm/weights.h"

#include <ATen/ops/empty.h>

#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/io/safetensors.h"
#include "read_file.h"
#include "untrusted_json.h"

namespace kvkeep::lm {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// The safetensors files of one model, and which of them holds which tensor.
class Checkpoint {
 public:
  explicit Checkpoint(const fs::path& folder) {
    const fs::path single = folder / "model.safetensors", index = folder / "model.safetensors.index.json";
    std::error_code none;
    if (fs::exists(single, none)) {
      where_ = single.string();
      files_.emplace(where_, io::SafetensorsFile::open(single));
      for (const std::string& name : files_.begin()->second.names()) file_of_[name] = where_;
      return;
    }
    KVKEEP_REQUIRE(fs::exists(index, none), "read weights: ", folder.string(), " has neither model.safetensors nor model.safetensors.index.json");
    where_ = index.string();
    read_index(folder, index);
  }

  // Checks dtype and shape; the returned view costs nothing yet.
  [[nodiscard]] Tensor matrix(const TensorSpec& wanted) const {
    const auto found = file_of_.find(wanted.name);
    KVKEEP_REQUIRE(found != file_of_.end(), "read weights: tensor '", wanted.name, "' is missing in ", where_,
            "; the model of config.json needs it");
    Tensor tensor = files_.at(found->second).tensor(wanted.name);
    KVKEEP_REQUIRE(is_scorable(tensor.scalar_type()), "read weights: tensor '", wanted.name, "' in ", found->second, " has dtype ",
            c10::toString(tensor.scalar_type()), "; allowed f32, f16, bf16");
    KVKEEP_REQUIRE(tensor.sizes().vec() == wanted.shape, "read weights: tensor '", wanted.name, "' in ", found->second, " has shape ",
            tensor.sizes(), "; config.json asks for ", at::IntArrayRef(wanted.shape));
    return tensor;
  }

 private:
  void read_index(const fs::path& folder, const fs::path& path) {
    const Json parsed = io::read_json(io::read_file(path, "read weights"), "read weights: " + where_);
    KVKEEP_REQUIRE(parsed.is_object() && parsed.contains("weight_map") && parsed["weight_map"].is_object(), "read weights: ", where_,
            " has no object weight_map");
    for (const auto& [tensor, file] : parsed["weight_map"].items()) {
      KVKEEP_REQUIRE(file.is_string(), "read weights: weight_map of ", where_, " gives no file name for '", io::shortened(tensor), "'");
      const fs::path name = file.get<std::string>();
      // A shard lies beside its index; anything else would let a downloaded file name any file of this machine.
      KVKEEP_REQUIRE(name == name.filename() && !name.empty() && name != "..", "read weights: weight_map of ", where_, " sends '", io::shortened(tensor),
              "' to '", io::shortened(name.string()), "'; allowed a file in the same folder");
      const std::string shard = (folder / name).string();
      if (!files_.contains(shard)) files_.emplace(shard, io::SafetensorsFile::open(shard));
      KVKEEP_REQUIRE(files_.at(shard).has(tensor), "read weights: tensor '", io::shortened(tensor), "' is missing in ", shard, ", where ", where_, " says it is");
      file_of_[tensor] = shard;
    }
  }

  std::string where_;
  std::map<std::string, io::SafetensorsFile> files_;
  std::map<std::string, std::string> file_of_;
};

std::string layer_prefix(std::int32_t layer) { return text("model.layers.", layer, "."); }

// The tensors of one linear map by its name in the checkpoint.
struct LinearSpec {
  std::string name;
  std::int64_t out, in;
  bool bias;
};

std::vector<LinearSpec> linears_of(const LmConfig& config, std::int32_t layer) {
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

Tensor widened(const Tensor& tensor) { return tensor.to(kFloat32, /*non_blocking=*/false, /*copy=*/true); }

Linear linear_from(const Checkpoint& checkpoint, const LinearSpec& linear) {
  Linear loaded{checkpoint.matrix({linear.name + ".weight", {linear.out, linear.in}}), {}};
  if (linear.bias) loaded.bias = widened(checkpoint.matrix({linear.name + ".bias", {linear.out}}));
  return loaded;
}

LayerWeights layer_from(const Checkpoint& checkpoint, const LmConfig& config, std::int32_t layer) {
  const std::string prefix = layer_prefix(layer);
  const auto norm = [&](const std::string& name, std::int64_t size) {
    return widened(checkpoint.matrix({prefix + name + ".weight", {size}}));
  };
  const std::vector<LinearSpec> linears = linears_of(config, layer);
  LayerWeights weights;
  Linear* const targets[] = {&weights.q, &weights.k, &weights.v, &weights.o, &weights.gate, &weights.up, &weights.down};
  for (std::size_t i = 0; i < linears.size(); ++i) *targets[i] = linear_from(checkpoint, linears[i]);
  weights.input_norm = norm("input_layernorm", config.hidden);
  weights.mlp_norm = norm("post_attention_layernorm", config.hidden);
  if (config.qk_norm) {
    weights.q_norm = norm("self_attn.q_norm", config.spec.key_dim);
    weights.k_norm = norm("self_attn.k_norm", config.spec.key_dim);
  }
  return weights;
}

std::string dtype_name(ScalarType dtype) { return dtype == kFloat32 ? "float32" : dtype == kFloat16 ? "float16" : "bfloat16"; }

// The standard library promises no bits for its distributions, so the normal numbers are made here.
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

Tensor random_tensor(const TensorSpec& spec, Normal& normal, ScalarType dtype) {
  Tensor values = at::empty(spec.shape, at::TensorOptions(kFloat32));
  const bool is_norm = spec.name.ends_with("norm.weight"), is_bias = spec.name.ends_with(".bias");
  const float mean = is_norm ? 1.0F : 0.0F;
  const float deviation = is_norm || is_bias ? 0.1F : 1.0F / std::sqrt(static_cast<float>(spec.shape.back()));
  float* data = values.mutable_data_ptr<float>();
  for (std::int64_t i = 0; i < values.numel(); ++i) data[i] = mean + deviation * normal();
  return values.to(dtype);
}

}  // namespace

std::vector<TensorSpec> checkpoint_tensors(const LmConfig& config) {
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
    tensors.push_back({prefix + "post_attention_layernorm.weight", {config.hidden}});
  }
  tensors.push_back({"model.norm.weight", {config.hidden}});
  if (!config.tied) tensors.push_back({"lm_head.weight", {config.vocab, config.hidden}});
  return tensors;
}

Weights Weights::read(const fs::path& folder, const LmConfig& config) {
  config.check();
  const Checkpoint checkpoint(folder);
  for (const TensorSpec& tensor : checkpoint_tensors(config)) (void)checkpoint.matrix(tensor);  // all checks before any work
  Weights weights;
  weights.embedding = checkpoint.matrix({"model.embed_tokens.weight", {config.vocab, config.hidden}});
  for (std::int32_t layer = 0; layer < config.num_layers(); ++layer) weights.layers.push_back(layer_from(checkpoint, config, layer));
  weights.final_norm = widened(checkpoint.matrix({"model.norm.weight", {config.hidden}}));
  weights.output = config.tied ? weights.embedding : checkpoint.matrix({"lm_head.weight", {config.vocab, config.hidden}});
  return weights;
}

Weights Weights::to(Device device) const {
  const auto move = [&](Tensor& tensor) {
    if (tensor.defined()) tensor = tensor.to(device);
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
      for (Tensor* vector : {&layer.input_norm, &layer.q_norm, &layer.k_norm, &layer.mlp_norm}) move(*vector);
      for (Linear* map : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
        move(map->weight);
        move(map->bias);
      }
    }
  } catch (const c10::Error& error) {
    const std::string why = error.what_without_backtrace();
    refuse<DeviceError>("weights: LibTorch cannot put them on ", device.str(), " (", why.substr(0, why.find('\n')), "); allowed a device that it has, with room for them");
  }
  return moved;
}

void write_random_checkpoint(const fs::path& folder, const LmConfig& config, std::uint64_t seed, ScalarType dtype, std::int32_t shards,
                             LmConfig::Layout layout) {
  config.check();
  KVKEEP_REQUIRE(is_scorable(dtype), "write random checkpoint: dtype is ", c10::toString(dtype), "; allowed f32, f16, bf16");
  const std::vector<TensorSpec> tensors = checkpoint_tensors(config);
  KVKEEP_REQUIRE(shards >= 1 && static_cast<std::size_t>(shards) <= tensors.size(), "write random checkpoint: shards is ", shards,
          "; allowed 1 to ", tensors.size());
  fs::create_directories(folder);
  io::write_text_atomically(folder / "config.json", config.json(dtype_name(dtype), layout));
  if (!config.end_tokens.empty())
    io::write_text_atomically(folder / "generation_config.json", Json{{"eos_token_id", config.end_tokens}}.dump(1) + "\n");

  Normal normal(seed);
  Json index{{"metadata", Json::object()}, {"weight_map", Json::object()}};
  const auto count = static_cast<std::size_t>(shards);
  const auto numbered = [](std::size_t n) { return text(n < 10 ? "0000" : "000", n); };
  for (std::size_t shard = 0; shard < count; ++shard) {
    const std::string file =
        shards == 1 ? "model.safetensors" : text("model-", numbered(shard + 1), "-of-", numbered(count), ".safetensors");
    std::vector<std::pair<std::string, Tensor>> part;
    for (std::size_t i = shard * tensors.size() / count; i < (shard + 1) * tensors.size() / count; ++i) {
      part.emplace_back(tensors[i].name, random_tensor(tensors[i], normal, dtype));
      index["weight_map"][tensors[i].name] = file;
    }
    io::write_safetensors(folder / file, part, {{"format", "pt"}});
  }
  if (shards > 1) io::write_text_atomically(folder / "model.safetensors.index.json", index.dump(1) + "\n");
}

}  // namespace kvkeep::lm
