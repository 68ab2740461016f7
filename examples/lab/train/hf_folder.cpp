// SPDX-License-Identifier: Apache-2.0
#include "hf_folder.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvlab/tasks.h"

namespace train {
namespace {

using Json = nlohmann::ordered_json;

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  KVKEEP_REQUIRE(in.good(), "read: cannot open; given ", path, "; allowed a folder that --out wrote");
  std::ostringstream bytes;
  bytes << in.rdbuf();
  return std::move(bytes).str();
}

Json config_of(const LlamaShape& shape, int32_t trained_length) {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"attention_bias", false},
          {"attention_dropout", 0.0},
          {"bos_token_id", static_cast<int>(kvkeep::lm::kBos)},
          {"eos_token_id", static_cast<int>(kvkeep::lm::kEnd)},
          {"pad_token_id", static_cast<int>(kvkeep::lm::kPad)},
          {"head_dim", shape.head_width},
          {"hidden_act", "silu"},
          {"hidden_size", shape.width},
          {"initializer_range", 0.02},
          {"intermediate_size", shape.mlp_width},
          {"max_position_embeddings", trained_length},
          {"mlp_bias", false},
          {"model_type", "llama"},
          {"num_attention_heads", shape.query_heads},
          {"num_hidden_layers", shape.layers},
          {"num_key_value_heads", shape.kv_heads},
          {"pretraining_tp", 1},
          {"rms_norm_eps", shape.norm_epsilon},
          {"rope_scaling", nullptr},
          {"rope_theta", shape.rope_theta},
          {"tie_word_embeddings", true},
          {"torch_dtype", "bfloat16"},
          {"transformers_version", "4.48.0"},
          {"use_cache", true},
          {"vocab_size", shape.vocabulary}};
}

std::string hf_name(std::string name) {
  std::replace(name.begin(), name.end(), '/', '.');
  return name;
}

std::string safetensors_of(const Llama& model) {
  Json header = {{"__metadata__", {{"format", "pt"}}}};
  std::string data;
  for (const auto& parameter : model.named_parameters()) {
    const torch::Tensor weight = parameter.value().detach().to(torch::kBFloat16).contiguous();
    const size_t begin = data.size();
    data.append(static_cast<const char*>(weight.const_data_ptr()), weight.nbytes());
    header[hf_name(parameter.key())] = {
        {"dtype", "BF16"}, {"shape", weight.sizes().vec()}, {"data_offsets", {begin, data.size()}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the data starts aligned
  std::string length(8, '\0');
  for (int byte = 0; byte < 8; ++byte) length[byte] = static_cast<char>(text.size() >> (8 * byte));
  return length + text + data;
}

}  // namespace

void write_hf_folder(const std::string& folder, const Llama& model, int32_t trained_length) {
  std::filesystem::create_directories(folder);
  const Json generation = {{"bos_token_id", static_cast<int>(kvkeep::lm::kBos)},
                           {"eos_token_id", static_cast<int>(kvkeep::lm::kEnd)},
                           {"pad_token_id", static_cast<int>(kvkeep::lm::kPad)},
                           {"do_sample", false}};
  kvkeep::io::write_text_atomically(folder + "/model.safetensors", safetensors_of(model));
  kvkeep::io::write_text_atomically(folder + "/config.json", config_of(model.shape(), trained_length).dump(2) + "\n");
  kvkeep::io::write_text_atomically(folder + "/generation_config.json", generation.dump(2) + "\n");
}

void read_hf_weights(const std::string& folder, Llama& model) {
  const std::string path = folder + "/model.safetensors", bytes = read_file(path);
  const auto refuse_file = [&](const std::string& what) {
    kvkeep::refuse("read weights: ", what, "; given ", path, "; allowed a file that --out wrote");
  };
  uint64_t header_bytes = 0;
  for (size_t byte = 0; byte < 8 && byte < bytes.size(); ++byte)
    header_bytes |= uint64_t{static_cast<uint8_t>(bytes[byte])} << (8 * byte);
  if (bytes.size() < 8 || header_bytes > bytes.size() - 8) refuse_file("the header is cut short");
  const Json header = Json::parse(bytes.substr(8, header_bytes), nullptr, /*allow_exceptions=*/false);
  const size_t data = 8 + header_bytes;

  torch::NoGradGuard no_grad;
  for (auto& parameter : model.named_parameters()) {
    const std::string name = hf_name(parameter.key());
    torch::Tensor weight = torch::empty(parameter.value().sizes(), torch::kBFloat16);
    if (!header.is_object() || !header.contains(name)) refuse_file("no tensor " + name);
    const Json& entry = header[name];
    if (entry.value("dtype", "") != "BF16" || entry.value("shape", std::vector<int64_t>{}) != weight.sizes().vec())
      refuse_file("wrong shape or dtype of " + name);
    const auto range = entry.value("data_offsets", std::vector<uint64_t>{});
    if (range.size() != 2 || range[1] < range[0] || range[1] - range[0] != weight.nbytes() ||
        range[1] > bytes.size() - data)
      refuse_file("wrong offsets of " + name);
    std::memcpy(weight.data_ptr(), bytes.data() + data + range[0], weight.nbytes());
    parameter.value().copy_(weight);
  }
}

}  // namespace train
