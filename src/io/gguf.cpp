// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/io/gguf.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <initializer_list>
#include <utility>

#include "ggml_blocks.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/parallel.h"
#include "kvkeep/io/untrusted_json.h"
#include "regular_file.h"

namespace kvkeep::io {
namespace {

constexpr std::string_view kReadGguf = "read GGUF";
constexpr std::uint32_t kMostDimensions = 4;
constexpr std::string_view kAlignmentKey = "general.alignment";

// Types of values by their numbers in files.
enum ValueType : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, characters, list, u64, i64, f64 };
constexpr std::array<std::string_view, 13> kTypeNames{"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                                      "bool", "string", "array", "u64", "i64", "f64"};
constexpr std::array<std::size_t, kTypeNames.size()> kItemBytes{
    1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8};  // of strings and arrays: the minimum
constexpr std::string_view kReadableValues = "u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, bool, string, array";

constexpr std::uint32_t one_of(std::initializer_list<ValueType> types) {
  std::uint32_t bits = 0;
  for (const ValueType type : types) bits |= 1U << type;
  return bits;
}
constexpr std::uint32_t kIntegers = one_of({u8, i8, u16, i16, u32, i32, u64, i64}), kFloats = one_of({f32, f64});

// Calls `read` with the item as its stored type.
auto as_integer(std::uint32_t type, const std::byte* item, auto&& read) {
  if (type == u8) return read(load<std::uint8_t>(item));
  if (type == i8) return read(load<std::int8_t>(item));
  if (type == u16) return read(load<std::uint16_t>(item));
  if (type == i16) return read(load<std::int16_t>(item));
  if (type == u32) return read(load<std::uint32_t>(item));
  if (type == i32) return read(load<std::int32_t>(item));
  if (type == u64) return read(load<std::uint64_t>(item));
  return read(load<std::int64_t>(item));
}

double as_float(std::uint32_t type, const std::byte* item) {
  return type == f32 ? double{load<float>(item)} : load<double>(item);
}

std::string_view string_at(const std::byte* item) {
  return {reinterpret_cast<const char*>(item) + sizeof(std::uint64_t),
          static_cast<std::size_t>(load<std::uint64_t>(item))};
}

// The beginning of every message about one tensor or one key.
std::string tensor_in_gguf(std::string_view name, const std::string& where) {
  return text(kReadGguf, ": tensor '", shortened(name), "' in ", where, " ");
}
std::string key_in(std::string_view key, const std::string& where) {
  return text(kReadGguf, ": key '", shortened(key), "' in ", where, " ");
}

std::uint64_t aligned(std::uint64_t offset, std::uint64_t alignment) {
  return (offset + alignment - 1) / alignment * alignment;
}

}  // namespace

// Walks the header. Nothing is read before it is known to exist.
struct GgufFile::Reader {
  GgufFile& file;
  const std::byte* data;
  std::size_t size;
  std::size_t at = 0;

  [[nodiscard]] std::size_t left() const { return size - at; }

  const std::byte* take(std::uint64_t bytes, std::string_view subject) {
    KVKEEP_REQUIRE(bytes <= left(), kReadGguf, ": ", subject, " of ", file.where_, " has ", bytes, " bytes from byte ",
                   at, " on, but only ", left(), " follow; is the file truncated?");
    const std::byte* begin = data + at;
    at += static_cast<std::size_t>(bytes);
    return begin;
  }
  template <class T>
  T number(std::string_view subject) {
    return load<T>(take(sizeof(T), subject));
  }
  std::string_view string(std::string_view subject) {
    const auto length = number<std::uint64_t>(subject);
    return {reinterpret_cast<const char*>(take(length, subject)), static_cast<std::size_t>(length)};
  }
  // The number of things, `subject` in the plural, that take at least `least` bytes each.
  std::uint64_t count(std::size_t least, std::string_view subject) {
    const auto count = number<std::uint64_t>(subject);
    KVKEEP_REQUIRE(count <= left() / least, kReadGguf, ": ", file.where_, " says that it has ", count, " ", subject,
                   ", but only ", left(), " bytes follow; is the file truncated?");
    return count;
  }

  void version() {
    KVKEEP_REQUIRE(size >= 4 && std::memcmp(data, "GGUF", 4) == 0, kReadGguf, ": ", file.where_,
                   " does not begin with 'GGUF'; allowed a GGUF file");
    at = 4;
    const auto found = number<std::uint32_t>("the version");
    KVKEEP_REQUIRE((found & 0xffffU) != 0 || found == 0, kReadGguf, ": ", file.where_,
                   " is big-endian; allowed little-endian files");
    KVKEEP_REQUIRE(found == 2 || found == 3, kReadGguf, ": ", file.where_, " has version ", found, "; allowed 2 and 3");
  }

  void value() {
    const std::string_view key = string("a key");
    const std::string subject = text("the value of '", shortened(key), "'");
    const auto known = [&](std::uint32_t type) {
      KVKEEP_REQUIRE(type < kTypeNames.size(), key_in(key, file.where_), "has a value of type ", type,
                     "; allowed 0 to ", kTypeNames.size() - 1, " (", kReadableValues, ")");
      return type;
    };
    Value value{known(number<std::uint32_t>(subject)), false, 1, 0};
    if (value.type == list) {
      value = {known(number<std::uint32_t>(subject)), true, 0, 0};
      KVKEEP_REQUIRE(value.type != list, key_in(key, file.where_),
                     "has an array of arrays; allowed arrays of numbers or strings");
      value.count = count(kItemBytes[value.type], text("items of '", shortened(key), "'"));
    }
    value.begin = at;
    if (value.type == characters) {
      for (std::uint64_t i = 0; i < value.count; ++i) (void)string(subject);
    } else {
      const std::byte* items = take(value.count * kItemBytes[value.type], subject);
      const auto is_truth = [](std::byte item) { return std::to_integer<unsigned>(item) <= 1; };
      KVKEEP_REQUIRE(value.type != boolean || std::all_of(items, items + value.count, is_truth),
                     key_in(key, file.where_), "holds a bool that is neither 0 nor 1");
    }
    KVKEEP_REQUIRE(file.values_.emplace(key, value).second, key_in(key, file.where_), "appears twice; allowed once");
  }

  void tensor() {
    const std::string_view name = string("a tensor's name");
    const std::string subject = text("the description of '", shortened(name), "'"),
                      complaint = tensor_in_gguf(name, file.where_);
    const auto dimensions = number<std::uint32_t>(subject);
    KVKEEP_REQUIRE(dimensions <= kMostDimensions, complaint, "has ", dimensions, " dimensions; allowed at most ",
                   kMostDimensions);
    constexpr std::uint64_t kMostElements = std::uint64_t{1} << 62;
    std::vector<std::int64_t> shape;
    std::uint64_t elements = 1;
    bool empty = false;
    for (std::uint32_t d = 0; d < dimensions; ++d) {
      const auto extent = number<std::uint64_t>(subject);
      empty = empty || extent == 0;
      const std::uint64_t factor = std::max<std::uint64_t>(extent, 1);  // strides are made from the others
      KVKEEP_REQUIRE(factor <= kMostElements / elements, complaint,
                     "has a shape whose product overflows; allowed at most 2^62 numbers");
      elements *= factor;
      shape.insert(shape.begin(), static_cast<std::int64_t>(extent));
    }
    const auto number_of_type = number<std::uint32_t>(subject);
    const GgmlType* type = ggml_type(number_of_type);
    KVKEEP_REQUIRE(type != nullptr, complaint, "has type ", number_of_type, " (", ggml_type_name(number_of_type),
                   "); allowed ", kReadableGgmlTypes);
    const std::int64_t row = shape.empty() ? 1 : shape.back();
    KVKEEP_REQUIRE(row % type->values == 0, complaint, "has rows of ", row, " numbers; allowed multiples of ",
                   type->values, ", the block of ", type->name);
    const auto blocks = static_cast<std::int64_t>(empty ? 0 : elements / static_cast<std::uint64_t>(type->values));
    std::optional<Dtype> dtype;
    if (type->values == 1) dtype = type->name == "F32" ? Dtype::f32 : type->name == "F16" ? Dtype::f16 : Dtype::bf16;
    const auto begin = number<std::uint64_t>(subject);  // of the data so far
    Entry entry{{std::move(shape), type->name, dtype}, type, static_cast<std::size_t>(begin), blocks};
    KVKEEP_REQUIRE(file.tensors_.emplace(name, std::move(entry)).second, complaint, "appears twice; allowed once");
    file.names_.push_back(name);
  }

  std::uint64_t alignment() const {
    if (!file.has_key(kAlignmentKey)) return 32;
    const std::uint64_t alignment = file.whole_number(kAlignmentKey);
    KVKEEP_REQUIRE(std::has_single_bit(alignment) && alignment <= 1U << 31, key_in(kAlignmentKey, file.where_), "is ",
                   alignment, "; allowed powers of two to 2^31");
    return alignment;
  }

  // Checks where the tensors say they are, and turns that into file offsets.
  void places() {
    const std::uint64_t alignment = this->alignment(), data_begin = aligned(at, alignment),
                        data_bytes = size > data_begin ? size - data_begin : 0;
    std::vector<std::pair<std::string_view, Entry*>> by_place;
    for (const std::string_view name : file.names_) by_place.emplace_back(name, &file.tensors_.at(name));
    std::stable_sort(by_place.begin(), by_place.end(), [](const auto& a, const auto& b) {
      return a.second->begin != b.second->begin ? a.second->begin < b.second->begin
                                                : a.second->blocks < b.second->blocks;
    });
    std::uint64_t end = 0;  // of the previous one
    for (auto& [name, entry] : by_place) {
      KVKEEP_REQUIRE(entry->begin % alignment == 0, tensor_in_gguf(name, file.where_), "begins at byte ", entry->begin,
                     " of the data; allowed multiples of ", alignment);
      KVKEEP_REQUIRE(entry->begin == aligned(end, alignment), tensor_in_gguf(name, file.where_), "begins at byte ",
                     entry->begin, " of the data, but the one before it ends at ", end,
                     "; allowed no overlap, and no hole beyond the padding to ", alignment);
      const auto blocks = static_cast<std::uint64_t>(entry->blocks),
                 block_bytes = static_cast<std::uint64_t>(entry->type->bytes);
      const std::uint64_t room = entry->begin < data_bytes ? data_bytes - entry->begin : 0;
      KVKEEP_REQUIRE(blocks <= room / block_bytes, tensor_in_gguf(name, file.where_), "has ", blocks, " blocks of ",
                     block_bytes, " bytes from byte ", entry->begin, " of the data on, but only ", room,
                     " follow; is the file truncated?");
      end = entry->begin + blocks * block_bytes;
      entry->begin += static_cast<std::size_t>(data_begin);
    }
  }
};

GgufFile GgufFile::open(const std::filesystem::path& path) {
  return parse(FileBytes::mapped(path, kReadGguf), path.string());
}

GgufFile GgufFile::from_bytes(std::string_view bytes, std::string name) {
  auto copy = FileBytes::copied(bytes, name, kReadGguf);
  return parse(std::move(copy), std::move(name));
}

GgufFile GgufFile::parse(std::shared_ptr<const FileBytes> bytes, std::string where) {
  GgufFile file;
  file.where_ = std::move(where);
  file.bytes_ = std::move(bytes);
  Reader reader{file, file.bytes_->data(), file.bytes_->size()};
  reader.version();
  constexpr std::size_t kLeastTensor = 8 + 4 + 4 + 8, kLeastValue = 8 + 4 + 1;
  const std::uint64_t tensors = reader.count(kLeastTensor, "tensors"), values = reader.count(kLeastValue, "keys");
  for (std::uint64_t i = 0; i < values; ++i) reader.value();
  for (std::uint64_t i = 0; i < tensors; ++i) reader.tensor();
  reader.places();
  return file;
}

std::vector<std::string_view> GgufFile::keys() const {
  std::vector<std::string_view> keys;
  for (const auto& [key, value] : values_) keys.push_back(key);
  return keys;
}

const GgufFile::Value& GgufFile::value(std::string_view key, bool array, std::uint32_t types,
                                       std::string_view allowed) const {
  const auto found = values_.find(key);
  KVKEEP_REQUIRE(found != values_.end(), kReadGguf, ": ", where_, " has no key '", shortened(key), "'; it should be ",
                 allowed);
  const Value& value = found->second;
  // The type of an empty array means nothing: writers name any.
  const bool fits = value.array == array && ((types >> value.type & 1U) != 0 || (array && value.count == 0));
  KVKEEP_REQUIRE(fits, key_in(key, where_), "is ",
                 value.array ? text("an array of ", value.count, " x ", kTypeNames[value.type])
                             : text("of type ", kTypeNames[value.type]),
                 "; allowed ", allowed);
  return value;
}

std::string_view GgufFile::string(std::string_view key) const {
  return string_at(bytes_->data() + value(key, false, one_of({characters}), "a string").begin);
}

std::uint64_t GgufFile::whole_number(std::string_view key) const {
  const Value& found = value(key, false, kIntegers, "a whole number");
  return as_integer(found.type, bytes_->data() + found.begin, [&](auto number) {
    KVKEEP_REQUIRE(number >= 0, key_in(key, where_), "is ", static_cast<std::int64_t>(number),
                   "; allowed whole numbers from 0");
    return static_cast<std::uint64_t>(number);
  });
}

double GgufFile::number(std::string_view key) const {
  const Value& found = value(key, false, kFloats, "a number stored as f32 or f64");
  return as_float(found.type, bytes_->data() + found.begin);
}

bool GgufFile::truth(std::string_view key) const {
  return bytes_->data()[value(key, false, one_of({boolean}), "a bool").begin] != std::byte{0};
}

std::vector<std::string_view> GgufFile::strings(std::string_view key) const {
  const Value& found = value(key, true, one_of({characters}), "an array of strings");
  std::vector<std::string_view> strings;
  strings.reserve(static_cast<std::size_t>(found.count));
  const std::byte* item = bytes_->data() + found.begin;
  for (std::uint64_t i = 0; i < found.count; ++i) {
    strings.push_back(string_at(item));
    item += sizeof(std::uint64_t) + strings.back().size();
  }
  return strings;
}

std::vector<std::int64_t> GgufFile::whole_numbers(std::string_view key) const {
  const Value& found = value(key, true, kIntegers, "an array of whole numbers");
  std::vector<std::int64_t> numbers;
  numbers.reserve(static_cast<std::size_t>(found.count));
  for (std::uint64_t i = 0; i < found.count; ++i) {
    numbers.push_back(
        as_integer(found.type, bytes_->data() + found.begin + i * kItemBytes[found.type], [&](auto number) {
          KVKEEP_REQUIRE(std::in_range<std::int64_t>(number), key_in(key, where_), "holds ",
                         static_cast<std::uint64_t>(number), "; allowed whole numbers below 2^63");
          return static_cast<std::int64_t>(number);
        }));
  }
  return numbers;
}

std::vector<double> GgufFile::numbers(std::string_view key) const {
  const Value& found = value(key, true, kFloats, "an array of numbers stored as f32 or f64");
  std::vector<double> numbers;
  numbers.reserve(static_cast<std::size_t>(found.count));
  for (std::uint64_t i = 0; i < found.count; ++i)
    numbers.push_back(as_float(found.type, bytes_->data() + found.begin + i * kItemBytes[found.type]));
  return numbers;
}

const GgufFile::Entry& GgufFile::entry(std::string_view name) const {
  const auto found = tensors_.find(name);
  KVKEEP_REQUIRE(found != tensors_.end(), kReadGguf, ": ", where_, " has no tensor '", shortened(name), "'");
  return found->second;
}

const GgufTensor& GgufFile::described(std::string_view name) const { return entry(name).described; }

namespace {

// Blocks from `begin` to `end` as T, a few at a time through f32.
template <class T>
void round_blocks(const GgmlType& type, const std::byte* blocks, std::int64_t begin, std::int64_t end, T* out) {
  constexpr std::int64_t kPiece = 2048;
  std::array<float, kPiece> wide;
  const std::int64_t most = kPiece / type.values;
  for (std::int64_t b = begin; b < end; b += most) {
    const std::int64_t count = std::min(most, end - b);
    type.widen(blocks + b * type.bytes, count, wide.data());
    std::transform(wide.data(), wide.data() + count * type.values, out + b * type.values,
                   [](float x) { return T(x); });  // rounds to nearest even
  }
}

Tensor empty_tensor(const std::vector<std::int64_t>& shape, Dtype dtype, const std::string& subject) {
  try {
    return empty(shape, dtype);
  } catch (const std::bad_alloc&) {
    refuse<DeviceError>(subject, "needs more memory than there is as ", dtype, "; its shape is ", Shape(shape));
  }
}

}  // namespace

Tensor GgufFile::tensor(std::string_view name, Dtype dtype) const {
  const Entry& found = entry(name);
  const GgmlType& type = *found.type;
  KVKEEP_REQUIRE(is_scorable(dtype), tensor_in_gguf(name, where_), "is requested as ", dtype,
                 "; allowed f32, f16, bf16");
  const Tensor out = empty_tensor(found.described.shape, dtype, tensor_in_gguf(name, where_));
  const std::byte* blocks = bytes_->data() + found.begin;
  constexpr std::int64_t kGrain = 1 << 16;  // numbers that justify a thread
  parallel_for(0, found.blocks, kGrain / type.values, [&](std::int64_t begin, std::int64_t end) {
    if (found.described.dtype == dtype) {
      std::memcpy(static_cast<std::byte*>(out.bytes()) + begin * type.bytes, blocks + begin * type.bytes,
                  static_cast<std::size_t>((end - begin) * type.bytes));
    } else if (dtype == Dtype::f32) {
      type.widen(blocks + begin * type.bytes, end - begin, out.data<float>() + begin * type.values);
    } else if (dtype == Dtype::f16) {
      round_blocks(type, blocks, begin, end, out.data<Half>());
    } else {
      round_blocks(type, blocks, begin, end, out.data<BFloat16>());
    }
  });
  return out;
}

}  // namespace kvkeep::io
