// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/io/untrusted_json.h"

#include <utility>
#include <vector>

namespace kvkeep::io {
namespace {

using Json = nlohmann::json;

/// Builds the value while it is read. nlohmann's own callback could refuse names too, but it walks all siblings at the
/// end of each object: quadratic.
class Builder final : public nlohmann::json_sax<Json> {
 public:
  explicit Builder(RepeatedNames names) : names_(names) {}

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    const auto [member, is_new] = open_.back()->get_ref<Json::object_t&>().try_emplace(name);
    member_ = &member->second;
    if (is_new || names_ == RepeatedNames::last_counts) return true;
    problem = text("names '", shortened(name), "' twice in one object; allowed once");
    return false;
  }

  bool parse_error(std::size_t place, const std::string&, const Json::exception&) override {
    problem = text("is not JSON in UTF-8 (at byte ", place, "); allowed one JSON value");
    return false;
  }

  Json root;
  std::string problem;

 private:
  Json* place(Json&& value) {
    if (open_.empty()) return &(root = std::move(value));
    if (open_.back()->is_object()) return &(*member_ = std::move(value));
    return &open_.back()->emplace_back(std::move(value));
  }
  bool put(Json&& value) {
    place(std::move(value));
    return true;
  }
  bool open(Json&& empty) {
    if (open_.size() < kDeepestJson) {
      open_.push_back(place(std::move(empty)));
      return true;
    }
    problem = text("nests deeper than ", kDeepestJson, " levels; allowed at most that many");
    return false;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  RepeatedNames names_;
  std::vector<Json*>
      open_;  ///< arrays and objects around the next value; nothing is added to one before those inside it are closed
  Json* member_ = nullptr;  ///< the member of the innermost object that was named last
};

}  // namespace

ParsedJson parse_json(std::string_view text, RepeatedNames names) {
  Builder builder(names);
  if (Json::sax_parse(text.begin(), text.end(), &builder)) return {std::move(builder.root), {}};
  return {nullptr, std::move(builder.problem)};
}

Json read_json(std::string_view text, std::string_view subject, RepeatedNames names) {
  ParsedJson parsed = parse_json(text, names);
  KVKEEP_REQUIRE(parsed.problem.empty(), subject, " ", parsed.problem);
  return std::move(parsed.value);
}

std::optional<std::int64_t> whole_number(const Json& value, std::int64_t least, std::int64_t most) {
  if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<std::uint64_t>() > INT64_MAX))
    return std::nullopt;
  const auto number = value.get<std::int64_t>();
  return number >= least && number <= most ? std::optional(number) : std::nullopt;
}

std::string without_controls(std::string json) {
  const auto is_c1 = [&](std::size_t i) {
    return json[i] == '\xC2' && i + 1 < json.size() && static_cast<unsigned char>(json[i + 1]) < 0xA0;
  };
  for (std::size_t i = 0; i < json.size(); ++i)
    if (json[i] == '\x7F' || is_c1(i)) {
      constexpr const char* kDigits = "0123456789abcdef";
      const std::size_t bytes = json[i] == '\x7F' ? 1 : 2;
      const auto code = static_cast<unsigned char>(json[i + bytes - 1]);
      json.replace(i, bytes, {'\\', 'u', '0', '0', kDigits[code >> 4U], kDigits[code & 15U]});
    }
  return json;
}

std::string in_utf8(const std::string& bytes) { return Json::parse(written(Json(bytes))).get<std::string>(); }

}  // namespace kvkeep::io
