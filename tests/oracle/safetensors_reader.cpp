// SPDX-License-Identifier: Apache-2.0
#include "safetensors_reader.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace oracle {
namespace {

template <class T>
T load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

double from_bf16(const char* at) {
  const uint32_t bits = static_cast<uint32_t>(load<uint16_t>(at)) << 16;
  return load<float>(reinterpret_cast<const char*>(&bits));
}

double from_f16(const char* at) {
  const uint16_t bits = load<uint16_t>(at);
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  double value = std::ldexp(exponent == 0 ? fraction : fraction + 1024, exponent == 0 ? -24 : exponent - 25);
  if (exponent == 31) value = fraction == 0 ? INFINITY : NAN;
  return bits >> 15 ? -value : value;
}

struct Dtype {
  size_t bytes;
  double (*widen)(const char*);
};

Dtype dtype_named(const std::string& name) {
  static const std::map<std::string, Dtype> known = {
      {"F64", {8, [](const char* p) { return load<double>(p); }}},
      {"F32", {4, [](const char* p) { return static_cast<double>(load<float>(p)); }}},
      {"F16", {2, from_f16}},
      {"BF16", {2, from_bf16}},
      {"I64", {8, [](const char* p) { return static_cast<double>(load<int64_t>(p)); }}},
      {"I32", {4, [](const char* p) { return static_cast<double>(load<int32_t>(p)); }}},
      {"U8", {1, [](const char* p) { return static_cast<double>(load<uint8_t>(p)); }}},
  };
  const auto found = known.find(name);
  if (found == known.end()) throw std::runtime_error("dtype " + name + " is not read here");
  return found->second;
}

TensorData tensor_from(const nlohmann::json& entry, const char* data, size_t size) {
  TensorData tensor;
  tensor.dtype = entry.at("dtype").get<std::string>();
  tensor.shape = entry.at("shape").get<std::vector<size_t>>();
  const Dtype dtype = dtype_named(tensor.dtype);
  const auto [first, last] = entry.at("data_offsets").get<std::pair<size_t, size_t>>();
  if (first > last || last > size) throw std::runtime_error("a tensor lies outside the file");
  for (size_t at = first; at + dtype.bytes <= last; at += dtype.bytes) tensor.data.push_back(dtype.widen(data + at));
  return tensor;
}

}  // namespace

TensorFile read_safetensors(const std::filesystem::path& path) try {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("no such file");
  const std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  if (bytes.size() < 8) throw std::runtime_error("too short");
  const uint64_t header = load<uint64_t>(bytes.data());
  if (header > bytes.size() - 8) throw std::runtime_error("the header is longer than the file");
  TensorFile file;
  const nlohmann::json entries = nlohmann::json::parse(bytes.substr(8, header));
  for (const auto& [name, entry] : entries.items()) {
    if (name == "__metadata__") {
      file.metadata = entry.get<std::map<std::string, std::string>>();
    } else {
      file.tensors[name] = tensor_from(entry, bytes.data() + 8 + header, bytes.size() - 8 - header);
    }
  }
  return file;
} catch (const std::exception& error) {
  throw std::runtime_error(path.string() + ": " + error.what());
}

}  // namespace oracle
