// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/io/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/io/untrusted_json.h"
#include "regular_file.h"

namespace kvkeep::io {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kReadSafetensors = "read safetensors";

constexpr std::array<std::pair<std::string_view, Dtype>, 13> kDtypes{{{"F64", Dtype::f64},
                                                                      {"F32", Dtype::f32},
                                                                      {"F16", Dtype::f16},
                                                                      {"BF16", Dtype::bf16},
                                                                      {"I64", Dtype::i64},
                                                                      {"I32", Dtype::i32},
                                                                      {"I16", Dtype::i16},
                                                                      {"I8", Dtype::i8},
                                                                      {"U64", Dtype::u64},
                                                                      {"U32", Dtype::u32},
                                                                      {"U16", Dtype::u16},
                                                                      {"U8", Dtype::u8},
                                                                      {"BOOL", Dtype::boolean}}};
constexpr std::string_view kAllowedDtypes = "F64, F32, F16, BF16, I64, I32, I16, I8, U64, U32, U16, U8, BOOL";
constexpr std::size_t kLengthBytes = sizeof(std::uint64_t);
constexpr std::uint64_t kLongestHeader = 100'000'000;

std::optional<Dtype> dtype_called(std::string_view name) {
  for (const auto& [known, dtype] : kDtypes)
    if (known == name) return dtype;
  return std::nullopt;
}

std::optional<std::string_view> safetensors_name(Dtype dtype) {
  for (const auto& [name, known] : kDtypes)
    if (known == dtype) return name;
  return std::nullopt;
}

std::map<std::string, std::string> parse_metadata(const Json& metadata, const std::string& where) {
  KVKEEP_REQUIRE(metadata.is_object(), "read safetensors: __metadata__ of ", where,
                 " is not an object; allowed an object of strings");
  std::map<std::string, std::string> strings;
  for (const auto& [key, value] : metadata.items()) {
    KVKEEP_REQUIRE(value.is_string(), "read safetensors: __metadata__ '", shortened(key), "' of ", where,
                   " is not a string; allowed strings only");
    strings[key] = value.get<std::string>();
  }
  return strings;
}

// The beginning of every message about one tensor.
std::string tensor_in(const std::string& name, const std::string& where) {
  return text("read safetensors: tensor '", shortened(name), "' in ", where, " ");
}

std::vector<std::uint64_t> whole_numbers(const Json& list, const std::string& subject, std::string_view field) {
  KVKEEP_REQUIRE(list.is_array(), subject, "has no list ", field, "; allowed a list of whole numbers");
  std::vector<std::uint64_t> numbers;
  numbers.reserve(list.size());
  for (const Json& item : list) {
    KVKEEP_REQUIRE(item.is_number_unsigned(), subject, "has ", shown(item), " in ", field,
                   "; allowed whole numbers from 0");
    numbers.push_back(item.get<std::uint64_t>());
  }
  return numbers;
}

std::uint64_t bytes_of_shape(const std::vector<std::uint64_t>& shape, std::uint64_t item_bytes,
                             const std::string& subject) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 62;
  const bool empty = std::find(shape.begin(), shape.end(), 0U) != shape.end();
  std::uint64_t bytes = item_bytes;
  for (const std::uint64_t size : shape) {
    KVKEEP_REQUIRE(size <= kMost, subject, "has a dimension of ", size,
                   "; allowed sizes whose product fits 2^62 bytes");
    if (size == 0) continue;  // strides are made from the others
    KVKEEP_REQUIRE(bytes <= kMost / size, subject, "has a shape whose product overflows; allowed at most 2^62 bytes");
    bytes *= size;
  }
  return empty ? 0 : bytes;
}

}  // namespace

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  return parse(FileBytes::mapped(path, kReadSafetensors), path.string());
}

SafetensorsFile SafetensorsFile::read(const std::filesystem::path& path) {
  return parse(FileBytes::copied(path, kReadSafetensors), path.string());
}

SafetensorsFile SafetensorsFile::from_bytes(std::string_view bytes, std::string name) {
  auto copy = FileBytes::copied(bytes, name, kReadSafetensors);
  return parse(std::move(copy), std::move(name));
}

SafetensorsFile SafetensorsFile::parse(std::shared_ptr<const FileBytes> bytes, std::string where) {
  KVKEEP_REQUIRE(bytes->size() >= kLengthBytes, "read safetensors: ", where, " has ", bytes->size(),
                 " bytes; allowed 8 or more (the header's length comes first)");
  const auto header_bytes = load<std::uint64_t>(bytes->data());
  KVKEEP_REQUIRE(header_bytes <= kLongestHeader, "read safetensors: ", where, " says its header has ", header_bytes,
                 " bytes; allowed at most ", kLongestHeader);
  KVKEEP_REQUIRE(header_bytes <= bytes->size() - kLengthBytes, "read safetensors: ", where, " says its header has ",
                 header_bytes, " bytes, but only ", bytes->size() - kLengthBytes, " follow; is the file truncated?");
  const std::string_view header(reinterpret_cast<const char*>(bytes->data()) + kLengthBytes, header_bytes);
  KVKEEP_REQUIRE(!header.empty() && header.front() == '{', "read safetensors: the header of ", where,
                 " does not begin with '{'; allowed one JSON object");

  SafetensorsFile file;
  file.where_ = std::move(where);
  file.data_begin_ = kLengthBytes + header_bytes;
  const std::size_t data_bytes = bytes->size() - file.data_begin_;
  file.bytes_ = std::move(bytes);
  // A repeated name would hide a tensor.
  const Json parsed = read_json(header, "read safetensors: the header of " + file.where_, RepeatedNames::refused);
  for (const auto& [name, described] : parsed.items()) {
    if (name == "__metadata__") {
      file.metadata_ = parse_metadata(described, file.where_);
      continue;
    }
    const std::string subject = tensor_in(name, file.where_);
    KVKEEP_REQUIRE(described.is_object() && described.size() == 3 && described.contains("dtype") &&
                       described.contains("shape") && described.contains("data_offsets"),
                   subject, "is not described by exactly dtype, shape and data_offsets");
    const Json& dtype_name = described["dtype"];
    KVKEEP_REQUIRE(dtype_name.is_string(), subject, "has a dtype that is not a string; allowed ", kAllowedDtypes);
    const std::optional<Dtype> dtype = dtype_called(dtype_name.get<std::string>());
    KVKEEP_REQUIRE(dtype.has_value(), subject, "has dtype '", shortened(dtype_name.get<std::string>()), "'; allowed ",
                   kAllowedDtypes);
    const std::vector<std::uint64_t> shape = whole_numbers(described["shape"], subject, "shape");
    KVKEEP_REQUIRE(shape.size() <= Shape::kMostDims, subject, "has ", shape.size(), " dimensions; allowed at most ",
                   Shape::kMostDims);
    const std::vector<std::uint64_t> offsets = whole_numbers(described["data_offsets"], subject, "data_offsets");
    KVKEEP_REQUIRE(offsets.size() == 2 && offsets[0] <= offsets[1], subject,
                   "has data_offsets that are not [begin, end] with begin <= end");
    KVKEEP_REQUIRE(offsets[1] <= data_bytes, subject, "ends at byte ", offsets[1], " of the data, but the file holds ",
                   data_bytes, "; is it truncated?");
    const std::uint64_t expected = bytes_of_shape(shape, element_size(*dtype), subject);
    KVKEEP_REQUIRE(offsets[1] - offsets[0] == expected, subject, "has ", offsets[1] - offsets[0],
                   " bytes by its data_offsets but ", expected, " by its dtype and shape");
    file.entries_.push_back({name,
                             *dtype,
                             {shape.begin(), shape.end()},
                             static_cast<std::size_t>(offsets[0]),
                             static_cast<std::size_t>(expected)});
  }

  std::stable_sort(file.entries_.begin(), file.entries_.end(), [](const Entry& a, const Entry& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.bytes < b.bytes;
  });
  std::size_t covered = 0;
  for (std::size_t i = 0; i < file.entries_.size(); ++i) {
    const Entry& entry = file.entries_[i];
    KVKEEP_REQUIRE(entry.begin == covered, tensor_in(entry.name, file.where_), "begins at byte ", entry.begin,
                   " of the data, but the one before it ends at ", covered, "; allowed no overlap and no hole");
    covered = entry.begin + entry.bytes;
    file.by_name_[entry.name] = i;
  }
  KVKEEP_REQUIRE(covered == data_bytes, "read safetensors: the tensors of ", file.where_, " cover ", covered,
                 " bytes, but ", data_bytes, " follow the header; allowed only bytes that belong to a tensor");
  return file;
}

bool SafetensorsFile::has(std::string_view name) const { return by_name_.find(name) != by_name_.end(); }

Tensor SafetensorsFile::tensor(std::string_view name) const {
  const auto found = by_name_.find(name);
  KVKEEP_REQUIRE(found != by_name_.end(), "read safetensors: ", where_, " has no tensor '", name, "'");
  const Entry& entry = entries_[found->second];
  const std::byte* data = bytes_->data() + data_begin_ + entry.begin;
  if (entry.bytes == 0 || reinterpret_cast<std::uintptr_t>(data) % element_size(entry.dtype) != 0) {
    Tensor copy = empty(entry.shape, entry.dtype);
    if (entry.bytes > 0) std::memcpy(copy.bytes(), data, entry.bytes);
    return copy;
  }
  // Views take a pointer that may be written through; nothing here writes, and the pages are read-only.
  return {const_cast<std::byte*>(data), entry.dtype, entry.shape, Device{}, Owner::of(bytes_)};
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  names.reserve(entries_.size());
  for (const Entry& entry : entries_) names.push_back(entry.name);
  return names;
}

namespace {

/// What comes before the data: the length of the header, and the header; and the data, tensor by tensor.
struct Layout {
  std::string head;
  std::vector<Tensor> data;
};

/// `where`: names the file in messages.
Layout lay_out(const std::string& where, const std::vector<std::pair<std::string, Tensor>>& tensors,
               const std::map<std::string, std::string>& metadata) {
  // The header is assembled by hand: its order is the order of the data, which nlohmann's sorted object would lose.
  const auto quoted = [&](const std::string& string) {
    try {
      return Json(string).dump();
    } catch (const Json::exception&) {
      refuse("write safetensors: a name or metadata string for ", where, " is not UTF-8");
    }
  };
  std::string header = "{";
  if (!metadata.empty()) {
    header += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata)
      header += text(header.back() == '{' ? "" : ",", quoted(key), ":", quoted(value));
    header += "}";
  }
  std::set<std::string> names{"__metadata__"};
  std::vector<Tensor> data;
  std::size_t begin = 0;
  for (const auto& [name, tensor] : tensors) {
    KVKEEP_REQUIRE(names.insert(name).second, "write safetensors: the name '", name, "' is given twice or reserved (",
                   where, ")");
    KVKEEP_REQUIRE(tensor.defined(), "write safetensors: tensor '", name, "' is undefined (", where, ")");
    const std::optional<std::string_view> dtype = safetensors_name(tensor.dtype());
    KVKEEP_REQUIRE(dtype.has_value(), "write safetensors: tensor '", name, "' has dtype ", tensor.dtype(), "; allowed ",
                   kAllowedDtypes);
    data.push_back(tensor.device().is_cpu() ? contiguous(tensor) : clone(tensor));
    const std::size_t end = begin + data.back().nbytes();
    header += text(header.back() == '{' ? "" : ",", quoted(name), ":{\"dtype\":\"", *dtype, "\",\"shape\":",
                   Json(std::vector<std::int64_t>(data.back().sizes().begin(), data.back().sizes().end())).dump(),
                   ",\"data_offsets\":[", begin, ",", end, "]}");
    begin = end;
  }
  header += "}";
  header.append((kLengthBytes - header.size() % kLengthBytes) % kLengthBytes, ' ');
  KVKEEP_REQUIRE(header.size() <= kLongestHeader, "write safetensors: the header of ", where, " would have ",
                 header.size(), " bytes; allowed ", kLongestHeader);

  const std::uint64_t length = header.size();
  return {std::string(reinterpret_cast<const char*>(&length), kLengthBytes) + header, std::move(data)};
}

}  // namespace

void write_safetensors(const std::filesystem::path& path, const std::vector<std::pair<std::string, Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  const Layout layout = lay_out(path.string(), tensors, metadata);
  AtomicFile file(path);
  file.write(layout.head);
  for (const Tensor& tensor : layout.data) file.write(tensor.bytes(), tensor.nbytes());
  file.commit();
}

std::vector<std::byte> safetensors_bytes(const std::vector<std::pair<std::string, Tensor>>& tensors,
                                         const std::map<std::string, std::string>& metadata) {
  const Layout layout = lay_out("bytes in memory", tensors, metadata);
  std::size_t size = layout.head.size();
  for (const Tensor& tensor : layout.data) size += tensor.nbytes();
  std::vector<std::byte> bytes;
  bytes.reserve(size);
  const auto add = [&bytes](const std::byte* from, std::size_t count) {
    bytes.insert(bytes.end(), from, from + count);
  };
  add(reinterpret_cast<const std::byte*>(layout.head.data()), layout.head.size());
  for (const Tensor& tensor : layout.data)
    if (tensor.nbytes() > 0) add(static_cast<const std::byte*>(tensor.bytes()), tensor.nbytes());
  return bytes;
}

}  // namespace kvkeep::io
