// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Reads the safetensors files of the golden cases, for tests only: trusts its input, widens everything to double.

#include <cstddef>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace oracle {

struct TensorData {
  std::string dtype;  ///< as in the file: F32, BF16, I32, ...
  std::vector<size_t> shape;
  std::vector<double> data;  ///< row-major
};

struct TensorFile {
  std::map<std::string, TensorData> tensors;
  std::map<std::string, std::string> metadata;
};

/// Throws std::runtime_error with the path where the file cannot be read.
TensorFile read_safetensors(const std::filesystem::path& path);

}  // namespace oracle
