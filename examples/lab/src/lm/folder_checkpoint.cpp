// SPDX-License-Identifier: Apache-2.0
/// The safetensors files of a Hugging Face folder, and which of them holds which tensor.

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/io/safetensors.h"
#include "kvkeep/io/untrusted_json.h"

namespace kvkeep::lm::detail {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

class FolderCheckpoint final : public Checkpoint {
 public:
  FolderCheckpoint(const fs::path& folder, const io::ModelConfig& config)
      : norms_above_stored_(config.architecture == io::Architecture::gemma3 ? 1 : 0) {
    const fs::path single = folder / "model.safetensors", index = folder / "model.safetensors.index.json";
    std::error_code none;
    if (fs::exists(single, none)) {
      where_ = single.string();
      files_.emplace(where_, io::SafetensorsFile::open(single));
      for (const std::string& name : files_.begin()->second.names()) file_of_[name] = where_;
      return;
    }
    KVKEEP_REQUIRE(fs::exists(index, none), "read weights: ", folder.string(),
                   " has neither model.safetensors nor model.safetensors.index.json");
    where_ = index.string();
    read_index(folder, index);
  }

  void check(const TensorSpec& wanted) const override { (void)stored(wanted); }

  [[nodiscard]] Tensor tensor(const TensorSpec& wanted, std::optional<Dtype> dtype) const override {
    const Tensor tensor = stored(wanted);
    return dtype ? tensor.to(torch_dtype(*dtype)) : tensor;
  }

  [[nodiscard]] double norms_above_stored() const override { return norms_above_stored_; }

  [[nodiscard]] double copied_bytes(const TensorSpec& wanted, std::optional<Dtype> dtype) const override {
    const Tensor tensor = stored(wanted);
    return dtype && torch_dtype(*dtype) != tensor.scalar_type()
               ? static_cast<double>(tensor.numel()) * static_cast<double>(element_size(*dtype))
               : 0;
  }

 private:
  // Checks dtype and shape; the returned view costs nothing yet.
  [[nodiscard]] Tensor stored(const TensorSpec& wanted) const {
    const auto found = file_of_.find(wanted.name);
    KVKEEP_REQUIRE(found != file_of_.end(), "read weights: tensor '", wanted.name, "' is missing in ", where_,
                   "; the model of config.json needs it");
    const kvkeep::Tensor tensor = files_.at(found->second).tensor(wanted.name);
    KVKEEP_REQUIRE(is_scorable(tensor.dtype()), "read weights: tensor '", wanted.name, "' in ", found->second,
                   " has dtype ", tensor.dtype(), "; allowed f32, f16, bf16");
    KVKEEP_REQUIRE(tensor.sizes() == Shape(wanted.shape), "read weights: tensor '", wanted.name, "' in ", found->second,
                   " has shape ", tensor.sizes(), "; config.json asks for ", Shape(wanted.shape));
    return tensor;
  }

  void read_index(const fs::path& folder, const fs::path& path) {
    const Json parsed = io::read_json(io::read_file(path, "read weights"), "read weights: " + where_);
    KVKEEP_REQUIRE(parsed.is_object() && parsed.contains("weight_map") && parsed["weight_map"].is_object(),
                   "read weights: ", where_, " has no weight_map object");
    for (const auto& [tensor, file] : parsed["weight_map"].items()) {
      KVKEEP_REQUIRE(file.is_string(), "read weights: weight_map of ", where_, " has no file name for '",
                     shortened(tensor), "'");
      const fs::path name = file.get<std::string>();
      // A shard is beside its index; anything else would let a downloaded file name any file on this machine.
      KVKEEP_REQUIRE(name == name.filename() && !name.empty() && name != "..", "read weights: weight_map of ", where_,
                     " maps '", shortened(tensor), "' to '", shortened(name.string()),
                     "'; allowed a file in the same folder");
      const std::string shard = (folder / name).string();
      if (!files_.contains(shard)) files_.emplace(shard, io::SafetensorsFile::open(shard));
      KVKEEP_REQUIRE(files_.at(shard).has(tensor), "read weights: tensor '", shortened(tensor), "' is missing in ",
                     shard, ", where ", where_, " says it is");
      file_of_[tensor] = shard;
    }
  }

  double norms_above_stored_;
  std::string where_;
  std::map<std::string, io::SafetensorsFile> files_;
  std::map<std::string, std::string> file_of_;
};

}  // namespace

std::unique_ptr<const Checkpoint> open_folder_checkpoint(const fs::path& folder, const io::ModelConfig& config) {
  return std::make_unique<FolderCheckpoint>(folder, config);
}

std::unique_ptr<const Checkpoint> Checkpoint::open(const fs::path& path, const io::ModelConfig& config) {
  std::error_code none;
  return fs::is_regular_file(path, none) ? open_gguf_checkpoint(path, config) : open_folder_checkpoint(path, config);
}

}  // namespace kvkeep::lm::detail
