// SPDX-License-Identifier: Apache-2.0
#include "torch_archive.h"

#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include "kvkeep/core/dtype.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"

namespace kvkeep::lm {
namespace {

constexpr std::size_t kEndBytes = 22, kEntryBytes = 46, kLocalBytes = 30, kAlignment = 64;
constexpr std::uint32_t kEndSignature = 0x06054b50, kEntrySignature = 0x02014b50, kLocalSignature = 0x04034b50;
constexpr std::size_t kLongestComment = 65535, kLongestPickle = std::size_t{16} << 20;
constexpr std::uint16_t kEncrypted = 1;

std::uint64_t number_at(std::string_view bytes, std::size_t at, int count) {
  std::uint64_t value = 0;
  for (int i = 0; i < count; ++i)
    value |= std::uint64_t{static_cast<unsigned char>(bytes[at + static_cast<std::size_t>(i)])} << (8 * i);
  return value;
}

std::string little_endian_bytes(std::uint64_t value, int count) {
  std::string bytes;
  for (int i = 0; i < count; ++i) bytes.push_back(static_cast<char>(value >> (8 * i) & 0xff));
  return bytes;
}

std::uint32_t checksum(std::string_view bytes) {
  static const std::array<std::uint32_t, 256> table = [] {
    std::array<std::uint32_t, 256> made{};
    for (std::uint32_t n = 0; n < made.size(); ++n) {
      std::uint32_t c = n;
      for (int bit = 0; bit < 8; ++bit) c = (c & 1U) != 0 ? 0xedb88320U ^ (c >> 1U) : c >> 1U;
      made[n] = c;
    }
    return made;
  }();
  std::uint32_t c = 0xffffffffU;
  for (const char byte : bytes) c = table[(c ^ static_cast<unsigned char>(byte)) & 0xffU] ^ (c >> 8U);
  return c ^ 0xffffffffU;
}

/// Bytes of one element of a storage class, 0 for others.
std::size_t element_bytes(const std::string& storage) {
  if (storage == "torch DoubleStorage") return 8;
  if (storage == "torch FloatStorage") return 4;
  if (storage == "torch HalfStorage" || storage == "torch BFloat16Storage") return 2;
  return 0;
}

}  // namespace

/// Runs the part of pickle protocol 2 that torch.save uses.
class TorchArchive::Unpickler {
 public:
  Unpickler(TorchArchive& archive, std::string_view pickle) : archive_(archive), pickle_(pickle) {}

  const Value* run() {
    while (true) {
      const std::size_t place = at_;
      const auto op = static_cast<unsigned char>(take(1)[0]);
      switch (op) {
        case 0x80:
          require_damaged(number(1) <= 5);
          break;  // PROTO
        case 'N':
          make(Kind::none);
          break;
        case 0x88:
          make(Kind::boolean).integer = 1;
          break;
        case 0x89:
          make(Kind::boolean).integer = 0;
          break;
        case 'J':
          make(Kind::integer).integer = static_cast<std::int32_t>(number(4));
          break;
        case 'K':
          make(Kind::integer).integer = static_cast<std::int64_t>(number(1));
          break;
        case 'M':
          make(Kind::integer).integer = static_cast<std::int64_t>(number(2));
          break;
        case 0x8a:
          long_integer();
          break;
        case 'G':
          real();
          break;
        case 'X':
          make(Kind::string).text = take(number(4));
          break;
        case 'c':
          global();
          break;
        case ']':
        case ')':
          make(Kind::list);
          break;
        case '}':
          make(Kind::dict);
          break;
        case '(':
          marks_.push_back(stack_.size());
          break;
        case 't':
          collect(since_mark());
          break;
        case 0x85:
          collect(1);
          break;
        case 0x86:
          collect(2);
          break;
        case 0x87:
          collect(3);
          break;
        case 'a':
          append(1);
          break;
        case 'e':
          append(since_mark());
          break;
        case 's':
          set(2);
          break;
        case 'u':
          set(since_mark());
          break;
        case 'q':
          memo_[number(1)] = top();
          break;
        case 'r':
          memo_[number(4)] = top();
          break;
        case 'h':
          recall(number(1));
          break;
        case 'j':
          recall(number(4));
          break;
        case '0':
          pop();
          break;
        case 'Q':
          persistent();
          break;
        case 'R':
          call();
          break;
        case '.': {
          const Value* root = pop();
          require_damaged(stack_.empty() && marks_.empty());
          return root;
        }
        default:
          refuse(where(), "holds pickle instruction ", static_cast<int>(op), " at byte ", place,
                 "; allowed dicts, lists, numbers, strings and tensors");
      }
    }
  }

 private:
  [[nodiscard]] std::string where() const { return text("read calibration: the object in ", archive_.name_, " "); }
  void require_damaged(bool ok) const { KVKEEP_REQUIRE(ok, where(), "is damaged near byte ", at_, " of its pickle"); }

  std::string_view take(std::uint64_t bytes) {
    KVKEEP_REQUIRE(bytes <= pickle_.size() - at_, where(), "ends in the middle of its pickle, at byte ",
                   pickle_.size());
    at_ += bytes;
    return pickle_.substr(at_ - bytes, bytes);
  }
  std::uint64_t number(int bytes) { return number_at(take(static_cast<std::uint64_t>(bytes)), 0, bytes); }
  std::string line() {
    const std::size_t end = pickle_.find('\n', at_);
    require_damaged(end != std::string_view::npos);
    std::string found(take(end - at_));
    take(1);
    return found;
  }

  Value& make(Kind kind) {
    archive_.values_.push_back({.kind = kind, .text = {}, .items = {}});
    stack_.push_back(&archive_.values_.back());
    return archive_.values_.back();
  }
  [[nodiscard]] std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  Value* top() {
    require_damaged(stack_.size() > floor());
    return stack_.back();
  }
  Value* pop() {
    Value* value = top();
    stack_.pop_back();
    return value;
  }
  /// Values above the newest mark, which is removed.
  std::size_t since_mark() {
    require_damaged(!marks_.empty());
    const std::size_t count = stack_.size() - marks_.back();
    marks_.pop_back();
    return count;
  }
  std::vector<const Value*> pop_many(std::size_t count) {
    require_damaged(stack_.size() - floor() >= count);
    std::vector<const Value*> values(stack_.end() - static_cast<std::ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    return values;
  }
  void collect(std::size_t count) {
    std::vector<const Value*> values = pop_many(count);
    make(Kind::list).items = std::move(values);
  }
  void append(std::size_t count) {
    const std::vector<const Value*> values = pop_many(count);
    Value* list = top();
    require_damaged(list->kind == Kind::list);
    list->items.insert(list->items.end(), values.begin(), values.end());
  }
  void set(std::size_t count) {
    const std::vector<const Value*> values = pop_many(count);
    Value* dict = top();
    require_damaged(dict->kind == Kind::dict && count % 2 == 0);
    dict->items.insert(dict->items.end(), values.begin(), values.end());
  }
  void recall(std::uint64_t index) {
    const auto found = memo_.find(index);
    require_damaged(found != memo_.end());
    stack_.push_back(found->second);
  }
  void long_integer() {
    const std::uint64_t bytes = number(1);
    KVKEEP_REQUIRE(bytes <= 8, where(), "holds an integer of ", bytes, " bytes; allowed up to 8");
    std::uint64_t value = number(static_cast<int>(bytes));
    if (bytes > 0 && bytes < 8 && (value >> (8 * bytes - 1)) != 0) value |= ~std::uint64_t{0} << (8 * bytes);  // sign
    make(Kind::integer).integer = static_cast<std::int64_t>(value);
  }
  void real() {
    const std::string_view bytes = take(8);
    std::uint64_t bits = 0;
    for (const char byte : bytes) bits = bits << 8U | static_cast<unsigned char>(byte);
    make(Kind::real).real = std::bit_cast<double>(bits);
  }
  void global() {
    const std::string module = line(), name = line();
    make(Kind::global).text = module + " " + name;
  }
  /// ("storage", class, key, device, elements)
  void persistent() {
    const Value* id = pop();
    require_damaged(id->kind == Kind::list && id->items.size() == 5 && id->items[0]->text == "storage" &&
                    id->items[1]->kind == Kind::global && id->items[2]->kind == Kind::string &&
                    id->items[4]->kind == Kind::integer);
    const Value *type = id->items[1], *key = id->items[2];
    const std::int64_t elements = id->items[4]->integer;
    Value& storage = make(Kind::storage);
    storage.integer = elements;
    storage.text = key->text;
    storage.items = {type};
  }
  void call() {
    const Value *arguments = pop(), *function = pop();
    require_damaged(arguments->kind == Kind::list && function->kind == Kind::global);
    const std::vector<const Value*>& given = arguments->items;
    if (function->text == "collections OrderedDict" && given.empty()) {
      make(Kind::dict);
    } else if (function->text == "torch Size" && given.size() == 1 && given[0]->kind == Kind::list) {
      make(Kind::list).items = given[0]->items;
    } else if (function->text == "torch._utils _rebuild_tensor_v2") {
      require_damaged(given.size() >= 4 && given[0]->kind == Kind::storage && given[1]->kind == Kind::integer &&
                      given[2]->kind == Kind::list && given[3]->kind == Kind::list);
      Value& tensor = make(Kind::tensor);
      tensor.integer = given[1]->integer;
      tensor.items = {given[0], given[2], given[3]};
    } else {
      refuse(where(), "calls '", function->text.substr(0, 80), "'; allowed only functions that make tensors and dicts");
    }
  }

  TorchArchive& archive_;
  std::string_view pickle_;
  std::size_t at_ = 0;
  std::vector<Value*> stack_;
  std::vector<std::size_t> marks_;
  std::map<std::uint64_t, Value*> memo_;
};

TorchArchive::TorchArchive(std::string_view bytes, std::string name) : bytes_(bytes), name_(std::move(name)) {
  read_directory();
  constexpr std::string_view kPickle = "data.pkl";
  for (const auto& [full, data] : records_)
    if (full == kPickle || full.ends_with(text("/", kPickle))) {
      KVKEEP_REQUIRE(prefix_.empty(), "read calibration: ", name_,
                     " holds more than one data.pkl; allowed archives that torch.save writes");
      prefix_ = full.substr(0, full.size() - kPickle.size());
    }
  if (const auto order = records_.find(prefix_ + "byteorder"); order != records_.end())
    KVKEEP_REQUIRE(order->second == "little", "read calibration: ", name_,
                   " was saved on a big-endian machine; allowed little-endian");
  const std::string_view pickle = record("data.pkl");
  KVKEEP_REQUIRE(pickle.size() <= kLongestPickle, "read calibration: data.pkl in ", name_, " has ", pickle.size(),
                 " bytes; allowed up to ", kLongestPickle);
  root_ = Unpickler(*this, pickle).run();
}

std::string_view TorchArchive::record(const std::string& name) const {
  const auto found = records_.find(prefix_ + name);
  KVKEEP_REQUIRE(found != records_.end(), "read calibration: ", name_, " has no record ", prefix_, name,
                 "; allowed archives that torch.save writes");
  return found->second;
}

void TorchArchive::read_directory() {
  const auto damaged = [&](bool ok, const char* what) {
    KVKEEP_REQUIRE(ok, "read calibration: the zip archive ", name_, " ", what, "; is it truncated or damaged?");
  };
  damaged(bytes_.size() >= kEndBytes, "is too short to have a directory");
  std::size_t end = bytes_.size() - kEndBytes;
  const std::size_t least = end > kLongestComment ? end - kLongestComment : 0;
  while (end > least && number_at(bytes_, end, 4) != kEndSignature) --end;
  damaged(
      number_at(bytes_, end, 4) == kEndSignature && end + kEndBytes + number_at(bytes_, end + 20, 2) == bytes_.size(),
      "has no directory at its end");
  const std::uint64_t count = number_at(bytes_, end + 10, 2), size = number_at(bytes_, end + 12, 4),
                      begin = number_at(bytes_, end + 16, 4);
  KVKEEP_REQUIRE(count != 0xffff && size != 0xffffffff && begin != 0xffffffff, "read calibration: ", name_,
                 " is a zip64 archive; allowed up to 65534 records and 4 GiB");
  damaged(number_at(bytes_, end + 4, 4) == 0 && number_at(bytes_, end + 8, 2) == count, "is one part of several");
  damaged(begin <= end && size <= end - begin, "has a directory outside the file");
  std::size_t at = begin;
  for (std::uint64_t i = 0; i < count; ++i) {
    damaged(begin + size - at >= kEntryBytes && number_at(bytes_, at, 4) == kEntrySignature, "has a broken directory");
    const std::uint64_t flags = number_at(bytes_, at + 8, 2), method = number_at(bytes_, at + 10, 2),
                        crc = number_at(bytes_, at + 16, 4);
    const std::uint64_t stored = number_at(bytes_, at + 20, 4), whole = number_at(bytes_, at + 24, 4),
                        local = number_at(bytes_, at + 42, 4);
    const std::uint64_t name_bytes = number_at(bytes_, at + 28, 2),
                        rest = number_at(bytes_, at + 30, 2) + number_at(bytes_, at + 32, 2);
    damaged(begin + size - at - kEntryBytes >= name_bytes + rest, "has a broken directory");
    std::string full(bytes_.substr(at + kEntryBytes, name_bytes));
    at += kEntryBytes + name_bytes + rest;
    KVKEEP_REQUIRE(method == 0 && stored == whole && (flags & kEncrypted) == 0, "read calibration: ", name_,
                   " holds compressed or encrypted records; allowed stored ones, as torch.save writes");
    damaged(local <= begin && begin - local >= kLocalBytes && number_at(bytes_, local, 4) == kLocalSignature,
            "has a record outside the file");
    const std::uint64_t data =
        local + kLocalBytes + number_at(bytes_, local + 26, 2) + number_at(bytes_, local + 28, 2);
    damaged(data <= begin && stored <= begin - data, "has a record outside the file");
    damaged(bytes_.substr(local + kLocalBytes, name_bytes) == full, "names a record in two ways");
    const std::string_view content = bytes_.substr(data, stored);
    damaged(checksum(content) == crc, "has a record whose checksum is wrong");
    damaged(records_.emplace(std::move(full), content).second, "holds a record twice");
  }
  damaged(at == begin + size, "has a broken directory");
}

const TorchArchive::Value* TorchArchive::find(const Value& dict, std::string_view key) {
  if (dict.kind != Kind::dict) return nullptr;
  const Value* found = nullptr;
  for (std::size_t i = 0; i < dict.items.size(); i += 2)
    if (dict.items[i]->kind == Kind::string && dict.items[i]->text == key)
      found = dict.items[i + 1];  // as in Python, the last one counts
  return found;
}

std::vector<double> TorchArchive::numbers(const Value& tensor, std::int64_t count, const std::string& what) const {
  const std::string subject = text("read calibration: ", what, " in ", name_, " ");
  KVKEEP_REQUIRE(tensor.kind == Kind::tensor, subject, "is not a tensor; allowed floating-point [", count, "]");
  const Value &storage = *tensor.items[0], &sizes = *tensor.items[1], &strides = *tensor.items[2];
  const std::string& type = storage.items[0]->text;
  const std::size_t bytes = element_bytes(type);
  KVKEEP_REQUIRE(bytes != 0, subject, "is stored as '", type.substr(0, 80),
                 "'; allowed Float, Double, Half and BFloat16");
  KVKEEP_REQUIRE(sizes.items.size() == 1 && strides.items.size() == 1 && sizes.items[0]->kind == Kind::integer &&
                     strides.items[0]->kind == Kind::integer && sizes.items[0]->integer == count,
                 subject, "does not have the shape [", count, "]");
  const std::string_view data = record("data/" + storage.text);
  const std::int64_t stride = strides.items[0]->integer, offset = tensor.integer,
                     held = static_cast<std::int64_t>(data.size() / bytes);
  const bool inside = storage.integer == held && data.size() % bytes == 0 && offset >= 0 && stride >= 0 &&
                      offset < held && (count == 1 || stride <= (held - 1 - offset) / (count - 1));
  KVKEEP_REQUIRE(inside, subject, "is outside its storage of ", held, " numbers (offset ", offset, ", stride ", stride,
                 ")");
  std::vector<double> out(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t bits =
        number_at(data, static_cast<std::size_t>(offset + i * stride) * bytes, static_cast<int>(bytes));
    double& x = out[static_cast<std::size_t>(i)];
    if (bytes == 8)
      x = std::bit_cast<double>(bits);
    else if (bytes == 4)
      x = static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
    else if (type == "torch HalfStorage")
      x = static_cast<double>(static_cast<float>(Half::from_bits(static_cast<std::uint16_t>(bits))));
    else
      x = static_cast<double>(static_cast<float>(BFloat16::from_bits(static_cast<std::uint16_t>(bits))));
  }
  return out;
}

TorchArchiveWriter::TorchArchiveWriter() : pickle_("\x80\x02") {}

void TorchArchiveWriter::little_endian(std::uint64_t value, int bytes) { pickle_ += little_endian_bytes(value, bytes); }

void TorchArchiveWriter::begin_dict() { pickle_ += "}("; }
void TorchArchiveWriter::end_dict() { pickle_ += 'u'; }
void TorchArchiveWriter::begin_list() { pickle_ += "]("; }
void TorchArchiveWriter::end_list() { pickle_ += 'e'; }

void TorchArchiveWriter::string(std::string_view text) {
  pickle_ += 'X';
  little_endian(text.size(), 4);
  pickle_ += text;
}

void TorchArchiveWriter::integer(std::int32_t value) {
  pickle_ += 'J';
  little_endian(static_cast<std::uint32_t>(value), 4);
}

void TorchArchiveWriter::real(double value) {
  pickle_ += 'G';
  const std::string bytes = little_endian_bytes(std::bit_cast<std::uint64_t>(value), 8);
  pickle_.append(bytes.rbegin(), bytes.rend());
}

void TorchArchiveWriter::tensor(const std::vector<float>& values) {
  const auto count = static_cast<std::int32_t>(values.size());
  pickle_ += "ctorch._utils\n_rebuild_tensor_v2\n((";
  string("storage");
  pickle_ += "ctorch\nFloatStorage\n";
  string(std::to_string(storages_.size()));
  string("cpu");
  integer(count);
  pickle_ += "tQ";
  integer(0);
  integer(count);
  pickle_ += '\x85';
  integer(1);
  pickle_ +=
      "\x85\x89"
      "ccollections\nOrderedDict\n)RtR";
  std::string& storage = storages_.emplace_back();
  for (const float x : values) storage += little_endian_bytes(std::bit_cast<std::uint32_t>(x), 4);
}

void TorchArchiveWriter::save(const std::filesystem::path& file) {
  const std::string folder = "calibration/";
  std::vector<std::pair<std::string, std::string>> records{{"data.pkl", pickle_ + "."}, {"byteorder", "little"}};
  for (std::size_t i = 0; i < storages_.size(); ++i) records.emplace_back("data/" + std::to_string(i), storages_[i]);
  records.emplace_back("version", "3\n");
  KVKEEP_REQUIRE(records.size() < 0xffff, "save calibration: ", file.string(), " would hold ", records.size(),
                 " records; allowed up to 65534, or the safetensors layout");
  std::string archive, directory;
  for (const auto& [name, content] : records) {
    const std::string full = folder + name;
    const std::size_t local = archive.size();
    const std::size_t unpadded = local + kLocalBytes + full.size() + 4;
    const std::size_t padding = (kAlignment - unpadded % kAlignment) % kAlignment;
    const auto put = [](std::string& to, std::initializer_list<std::pair<std::uint64_t, int>> numbers) {
      for (const auto& [value, bytes] : numbers) to += little_endian_bytes(value, bytes);
    };
    const std::uint64_t crc = checksum(content), size = content.size();
    put(archive, {{kLocalSignature, 4},
                  {20, 2},
                  {0x800, 2},
                  {0, 2},
                  {0, 2},
                  {0x21, 2},
                  {crc, 4},
                  {size, 4},
                  {size, 4},
                  {full.size(), 2},
                  {padding + 4, 2}});
    archive += full;
    put(archive, {{0x4246, 2}, {padding, 2}});  // an extra field "FB" moves the data to a multiple of 64 bytes
    archive.append(padding, 'Z');
    archive += content;
    put(directory, {{kEntrySignature, 4},
                    {20, 2},
                    {20, 2},
                    {0x800, 2},
                    {0, 2},
                    {0, 2},
                    {0x21, 2},
                    {crc, 4},
                    {size, 4},
                    {size, 4},
                    {full.size(), 2},
                    {0, 2},
                    {0, 2},
                    {0, 2},
                    {0, 2},
                    {0, 4},
                    {local, 4}});
    directory += full;
  }
  const std::size_t begin = archive.size(), count = records.size();
  KVKEEP_REQUIRE(begin + directory.size() < 0xffffffff, "save calibration: ", file.string(), " would have ", begin,
                 " bytes; allowed below 4 GiB, or the safetensors layout");
  archive += directory + little_endian_bytes(kEndSignature, 4) + little_endian_bytes(0, 4) +
             little_endian_bytes(count, 2) + little_endian_bytes(count, 2) + little_endian_bytes(directory.size(), 4) +
             little_endian_bytes(begin, 4) + little_endian_bytes(0, 2);
  io::write_text_atomically(file, archive);
}

}  // namespace kvkeep::lm
