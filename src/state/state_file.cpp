// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/state/state_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <span>

#include "kvkeep/core/error.h"
#include "kvkeep/io/untrusted_json.h"

namespace kvkeep {

// Eight sums side by side, each a chain of steps that lose no information: a difference in one word stays a difference
// in every later sum.
std::uint64_t checksum(std::span<const std::byte> bytes) {
  constexpr std::size_t kLanes = 8, kBlock = kLanes * sizeof(std::uint64_t);
  constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15;  // 2^64 / the golden ratio
  const auto step = [](std::uint64_t sum, std::uint64_t word) { return std::rotl((sum ^ word) * kOdd, 31); };
  std::array<std::uint64_t, kLanes> sums{};
  for (std::size_t i = 0; i < kLanes; ++i) sums[i] = (i + 1) * kOdd;
  const auto add = [&](const std::byte* block) {
    std::array<std::uint64_t, kLanes> words;
    std::memcpy(words.data(), block, kBlock);
    for (std::size_t i = 0; i < kLanes; ++i) sums[i] = step(sums[i], words[i]);
  };
  std::size_t done = 0;
  for (; done + kBlock <= bytes.size(); done += kBlock) add(bytes.data() + done);
  if (done < bytes.size()) {
    std::array<std::byte, kBlock> last{};
    std::memcpy(last.data(), bytes.data() + done, bytes.size() - done);
    add(last.data());
  }
  std::uint64_t all = bytes.size();
  for (const std::uint64_t sum : sums) {
    all = step(all, sum);
    all ^= all >> 29;
  }
  return all * kOdd;
}

namespace {

using Json = nlohmann::json;

constexpr const char *kSequenceKey = "kvkeep_sequence", *kChecksumKey = "checksum";
/// Format versions: of files that hold nothing which an earlier one does not know.
constexpr const char *kPlain = "3", *kWithPins = "4", *kWithUnread = "5";
constexpr std::size_t kMostNamed = 6;  ///< differences that a message lists

/// 16 digits in every locale.
std::string hexadecimal(std::uint64_t number) {
  std::array<char, 16> digits{};
  const std::size_t count =
      static_cast<std::size_t>(std::to_chars(digits.begin(), digits.end(), number, 16).ptr - digits.begin());
  return std::string(digits.size() - count, '0') + std::string(digits.data(), count);
}

/// Checksum of everything in a file but the checksum itself: the checksum of a list of checksums, one per tensor and
/// one of the words. The order of tensors does not matter, because a file does not define it when some are empty.
std::string checksum_of(const StateTensors& tensors, const std::map<std::string, std::string>& about) {
  std::string words;
  const auto add = [&words](std::string_view word) { words += text(word.size(), ':', word); };
  for (const auto& [key, value] : about)
    if (key != kChecksumKey) add(key), add(value);
  std::vector<std::uint64_t> sums;
  const std::map<std::string_view, Tensor> by_name(tensors.begin(), tensors.end());
  for (const auto& [name, tensor] : by_name) {
    add(name);
    add(text(tensor.dtype(), tensor.sizes()));
    sums.push_back(checksum({tensor.bytes(), static_cast<std::size_t>(tensor.nbytes())}));
  }
  sums.push_back(checksum(std::as_bytes(std::span(words))));
  return hexadecimal(checksum(std::as_bytes(std::span(sums))));
}

std::string shape_text(Shape shape) {
  std::string out = "[";
  for (const std::int64_t size : shape)
    out += text(out.size() == 1 ? "" : ", ", size < 0 ? std::string("any") : std::to_string(size));
  return out + "]";
}

/// By path; empty if the text is not an object.
Json fields_of(std::string_view object) {
  const Json parsed = io::parse_json(object).value;
  return parsed.is_object() && !parsed.empty() ? parsed.flatten() : Json::object();
}

std::string value_at(const Json& fields, const std::string& path) {
  return fields.contains(path) ? io::shown(fields.at(path)) : "not given";
}

}  // namespace

namespace {

/// With contiguous tensors, format version and checksum.
SavedState sealed(const SavedState& state) {
  SavedState whole{.tensors = {}, .about = state.about};
  for (const auto& [name, tensor] : state.tensors) whole.tensors.emplace_back(name, contiguous(tensor));
  const auto holds = [&](const char* name) {
    return std::ranges::find(state.tensors, name, &StateTensors::value_type::first) != state.tensors.end();
  };
  whole.about[kSequenceKey] = holds("queries.unread") ? kWithUnread : holds("pinned") ? kWithPins : kPlain;
  whole.about[kChecksumKey] = checksum_of(whole.tensors, whole.about);
  return whole;
}

}  // namespace

void write_state(const std::filesystem::path& file, const SavedState& state) {
  const SavedState whole = sealed(state);
  io::write_safetensors(file, whole.tensors, whole.about);
}

std::vector<std::byte> state_bytes(const SavedState& state) {
  const SavedState whole = sealed(state);
  return io::safetensors_bytes(whole.tensors, whole.about);
}

StateFile::StateFile(io::SafetensorsFile file) : file_(std::move(file)) {
  const std::string& version = about(kSequenceKey);
  KVKEEP_REQUIRE(version == kPlain || version == kWithPins || version == kWithUnread, "restore: ", where(),
                 " has format version ", shortened(version), "; allowed ", kPlain, ", ", kWithPins, ", ", kWithUnread);
  StateTensors all;
  for (const std::string& name : file_.names()) all.emplace_back(name, file_.tensor(name));
  KVKEEP_REQUIRE(checksum_of(all, file_.metadata()) == about(kChecksumKey), "restore: ", where(),
                 " is damaged: its content has a different checksum than when it was written; allowed a file as "
                 "save() left it");
}

// A copy: the bytes that are read are those whose checksum is checked.
StateFile StateFile::open(const std::filesystem::path& path) { return StateFile(io::SafetensorsFile::read(path)); }

StateFile StateFile::from_bytes(std::span<const std::byte> bytes) {
  return StateFile(
      io::SafetensorsFile::from_bytes({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, "the saved state"));
}

Tensor StateFile::tensor(const std::string& name, Dtype dtype, Shape shape) const {
  KVKEEP_REQUIRE(has(name), "restore: tensor \"", name, "\" is missing in ", where());
  const Tensor found = file_.tensor(name);
  const bool fits = found.dtype() == dtype &&
                    std::ranges::equal(found.sizes(), shape,
                                       [](std::int64_t is, std::int64_t wanted) { return wanted < 0 || is == wanted; });
  KVKEEP_REQUIRE(fits, "restore: tensor \"", name, "\" in ", where(), " is ", found.dtype(), " ",
                 shape_text(found.sizes()), "; allowed ", dtype, " ", shape_text(shape));
  return found;
}

const std::string& StateFile::about(const std::string& name) const {
  const auto found = file_.metadata().find(name);
  KVKEEP_REQUIRE(found != file_.metadata().end(), "restore: ", where(), " does not say its ", name,
                 "; allowed a file that Keeper::save() wrote");
  return found->second;
}

void StateFile::expect_same(const std::string& name, std::string_view mine,
                            std::span<const std::string_view> free) const {
  const Json there = fields_of(about(name)), here = fields_of(mine);
  std::set<std::string> paths;
  for (const Json* fields : {&there, &here})
    for (const auto& [path, value] : fields->items()) paths.insert(path);
  std::string wrong;
  std::size_t count = 0;
  for (const bool in_both : {true, false})  // fields that only one of them has often follow from the rest
    for (const std::string& path : paths) {
      if (in_both != (there.contains(path) && here.contains(path)) ||
          std::ranges::any_of(free, [&](std::string_view end) { return path.ends_with(end); }))
        continue;
      if (in_both && there.at(path) == here.at(path)) continue;
      if (++count <= kMostNamed)
        wrong += text(wrong.empty() ? "" : ", ", shortened(path.substr(1)), " is ", value_at(there, path),
                      " there and ", value_at(here, path), " here");
    }
  if (count > kMostNamed) wrong += text(", and ", count - kMostNamed, " more fields differ");
  KVKEEP_REQUIRE(count == 0, "restore: ", where(), " was saved with another ", name, ": ", wrong, "; allowed the same");
}

}  // namespace kvkeep
