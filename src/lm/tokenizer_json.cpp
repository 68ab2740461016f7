#include <nlohmann/json.hpp>

#include "kvkeep/core/error.h"
#include "tokenizer_plan.h"
#include "untrusted_json.h"

namespace kvkeep::lm::detail {
namespace {

using Json = nlohmann::json;

/// One object of the file; errors name the file and the object's place in it.
class Part {
 public:
  Part(const Json& value, std::string name) : value_(value), name_(std::move(name)) {
    KVKEEP_REQUIRE(value.is_object(), "read tokenizer: ", name_, " is ", io::shown(value), "; allowed an object");
  }

  [[nodiscard]] const std::string& name() const { return name_; }

  /// Null if it is missing or null, which the package treats alike.
  [[nodiscard]] const Json* find(const std::string& field) const {
    const auto found = value_.find(field);
    return found == value_.end() || found->is_null() ? nullptr : &*found;
  }

  [[nodiscard]] const Json& at(const std::string& field, const char* allowed) const {
    const Json* found = find(field);
    KVKEEP_REQUIRE(found != nullptr, "read tokenizer: ", name_, " has no ", io::shown(field), "; allowed ", allowed);
    return *found;
  }

  [[nodiscard]] bool truth(const char* field, bool otherwise) const {
    const Json* found = find(field);
    if (found == nullptr) return otherwise;
    KVKEEP_REQUIRE(found->is_boolean(), complaint(field, *found), "true or false");
    return found->get<bool>();
  }

  [[nodiscard]] const std::string& word(const char* field) const {
    const Json& found = at(field, "a string");
    KVKEEP_REQUIRE(found.is_string(), complaint(field, found), "a string");
    return found.get_ref<const std::string&>();
  }

  [[nodiscard]] std::int64_t id(const char* field) const {
    const Json& found = at(field, "a token id");
    const std::optional<std::int64_t> number = io::whole_number(found, 0, INT32_MAX);
    KVKEEP_REQUIRE(number.has_value(), complaint(field, found), "0 to ", INT32_MAX);
    return *number;
  }

  [[nodiscard]] const Json& list(const char* field) const {
    const Json& found = at(field, "a list");
    KVKEEP_REQUIRE(found.is_array(), complaint(field, found), "a list");
    return found;
  }

  [[nodiscard]] Part part(const std::string& field) const {
    return Part(at(field, "an object"), text(name_, ": ", io::shown(field)));
  }

  /// Refuses every value but the one that there is code for.
  void only(const char* field, bool allowed, const char* what) const {
    KVKEEP_REQUIRE_AS(Unsupported, allowed, complaint(field, at(field, what)), what);
  }

 private:
  [[nodiscard]] std::string complaint(const char* field, const Json& value) const {
    return text("read tokenizer: ", name_, " has ", field, " = ", io::shown(value), "; allowed ");
  }

  const Json& value_;
  std::string name_;
};

void read_vocabulary(const Part& model, TokenizerPlan& plan) {
  const Json& vocabulary = model.at("vocab", "an object of ids by token");
  KVKEEP_REQUIRE(vocabulary.is_object(), "read tokenizer: ", model.name(),
                 " has a vocab that is not an object; allowed an object of ids by token");
  plan.vocabulary.reserve(vocabulary.size());
  for (const auto& [token, number] : vocabulary.get_ref<const Json::object_t&>()) {
    const std::optional<std::int64_t> id = io::whole_number(number, 0, INT32_MAX);
    KVKEEP_REQUIRE(id.has_value(), "read tokenizer: ", plan.where, " gives ", io::shown(token), " the id ",
                   io::shown(number), "; allowed 0 to ", INT32_MAX);
    plan.vocabulary.push_back({*id, token, true});
  }
}

// "left right", as files were written before tokenizers 0.20, or ["left", "right"].
TokenizerPlan::Pair merge_of(const Json& merge, const std::string& where) {
  const auto complain = [&] {
    return text("read tokenizer: ", where, " has the merge ", io::shown(merge),
                "; allowed \"left right\" or [\"left\", \"right\"]");
  };
  if (merge.is_array()) {
    KVKEEP_REQUIRE(merge.size() == 2 && merge[0].is_string() && merge[1].is_string(), complain());
    return {merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>()};
  }
  KVKEEP_REQUIRE(merge.is_string(), complain());
  const std::string_view both = merge.get_ref<const std::string&>();
  const std::size_t blank = both.find(' ');
  KVKEEP_REQUIRE(blank != std::string_view::npos && both.find(' ', blank + 1) == std::string_view::npos, complain());
  return {both.substr(0, blank), both.substr(blank + 1)};
}

void read_model(const Part& model, TokenizerPlan& plan) {
  if (model.find("type") != nullptr) model.only("type", model.word("type") == "BPE", "BPE");
  for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (model.find(affix) != nullptr) model.only(affix, model.word(affix).empty(), "none");
  if (const Json* dropout = model.find("dropout")) model.only("dropout", dropout->is_number() && *dropout == 0, "none");
  if (model.truth("byte_fallback", false)) model.only("byte_fallback", false, "false");
  plan.ignore_merges = model.truth("ignore_merges", false);
  plan.fuse_unknown = model.truth("fuse_unk", false);
  if (model.find("unk_token") != nullptr) plan.unknown = model.word("unk_token");
  read_vocabulary(model, plan);
  const Json& merges = model.list("merges");
  plan.merges.reserve(merges.size());
  for (const Json& merge : merges) plan.merges.push_back(merge_of(merge, plan.where));
}

/// The members of a "Sequence", or the part itself if it is not one.
std::vector<Part> sequence(const Part& part, const char* members) {
  if (part.word("type") != "Sequence") return {part};
  std::vector<Part> parts;
  for (const Json& member : part.list(members)) parts.emplace_back(member, part.name());
  return parts;
}

void read_normalizer(const Part& normalizer, TokenizerPlan& plan) {
  for (const Part& part : sequence(normalizer, "normalizers")) {
    part.only("type", part.word("type") == "NFC", "NFC or none");
    plan.nfc = true;
  }
}

PreTokenizer pre_tokenizer_of(const Part& pre) {
  const std::vector<Part> parts = sequence(pre, "pretokenizers");
  const auto is = [&](std::size_t i, const char* type) { return i < parts.size() && parts[i].word("type") == type; };
  const bool bytes_last = !parts.empty() && parts.size() <= 2 && is(parts.size() - 1, "ByteLevel");
  if (bytes_last) {
    const Part& bytes = parts.back();
    if (bytes.truth("add_prefix_space", true)) bytes.only("add_prefix_space", false, "false");
    const bool cuts = bytes.truth("use_regex", true);
    if (parts.size() == 1 && cuts) return PreTokenizer::gpt2;
    if (is(0, "Digits") && parts.size() == 2 && cuts && parts[0].truth("individual_digits", false))
      return PreTokenizer::smollm;
    if (is(0, "Split") && parts.size() == 2 && !cuts && parts[0].word("behavior") == "Isolated" &&
        !parts[0].truth("invert", false)) {
      const Part pattern = parts[0].part("pattern");
      const std::string_view regex =
          pattern.find("Regex") != nullptr ? std::string_view(pattern.word("Regex")) : std::string_view();
      if (regex == kLlama3Words) return PreTokenizer::llama_bpe;
      if (regex == kQwen2Words) return PreTokenizer::qwen2;
      refuse<Unsupported>("read tokenizer: ", pre.name(), " cuts words by ", io::shown(regex),
                          "; allowed the expressions of Llama 3 and Qwen2");
    }
  }
  std::string types;
  for (const Part& part : parts) types += text(types.empty() ? "" : ", ", io::shown(part.word("type")));
  refuse<Unsupported>("read tokenizer: ", pre.name(), " is ", shortened(types),
                      " with options that together are none of: ", kPreTokenizerNames);
}

// What is put around a single text: nothing, or one token in front.
void read_template(const Part& part, TokenizerPlan& plan) {
  const Json& pieces = part.list("single");
  const auto is = [&](std::size_t i, const char* kind) {
    return i < pieces.size() && pieces[i].is_object() && pieces[i].contains(kind);
  };
  const bool plain = pieces.size() == 1 && is(0, "Sequence"),
             with_bos = pieces.size() == 2 && is(0, "SpecialToken") && is(1, "Sequence");
  part.only("single", plain || with_bos, "the text, and at most one token in front");
  if (plain) return;
  const std::string& name = Part(pieces[0], part.name()).part("SpecialToken").word("id");
  const Part token = part.part("special_tokens").part(name);
  const Json& ids = token.list("ids");
  const std::optional<std::int64_t> id = ids.size() == 1 ? io::whole_number(ids[0], 0, INT32_MAX) : std::nullopt;
  KVKEEP_REQUIRE(id.has_value(), "read tokenizer: ", token.name(), " has ids = ", io::shown(ids), "; allowed one id");
  KVKEEP_REQUIRE_AS(Unsupported, !plan.bos, "read tokenizer: ", part.name(),
                    " puts tokens in front twice; allowed once");
  plan.bos = id;
  plan.add_bos = true;
}

void read_post_processor(const Part& post, TokenizerPlan& plan) {
  for (const Part& part : sequence(post, "processors")) {
    if (part.word("type") == "ByteLevel") continue;  // moves offsets, not ids
    part.only("type", part.word("type") == "TemplateProcessing", "TemplateProcessing, ByteLevel or none");
    read_template(part, plan);
  }
}

void read_added(const Json& tokens, TokenizerPlan& plan) {
  KVKEEP_REQUIRE(tokens.is_array(), "read tokenizer: ", plan.where,
                 " has added_tokens that are not a list; allowed a list");
  plan.added.reserve(tokens.size());
  for (const Json& value : tokens) {
    const Part token(value, text(plan.where, ": added_tokens"));
    TokenizerPlan::Added added{.token = {.text = token.word("content"),
                                         .special = token.truth("special", false),
                                         .single_word = token.truth("single_word", false),
                                         .lstrip = token.truth("lstrip", false),
                                         .rstrip = token.truth("rstrip", false)}};
    added.token.id = static_cast<std::int32_t>(token.id("id"));
    added.normalized = token.truth("normalized", !added.token.special);
    plan.added.push_back(std::move(added));
  }
}

}  // namespace

TokenizerPlan plan_of(const Json& json, const std::string& where) {
  const Part file(json, where);
  TokenizerPlan plan;
  plan.where = where;
  for (const char* field : {"truncation", "padding"})
    if (file.find(field) != nullptr) file.only(field, false, "none");
  const auto part = [&](const char* field) { return file.part(field); };
  file.part("decoder").only("type", file.part("decoder").word("type") == "ByteLevel", "ByteLevel");
  if (file.find("normalizer") != nullptr) read_normalizer(part("normalizer"), plan);
  plan.pre = pre_tokenizer_of(part("pre_tokenizer"));
  if (file.find("post_processor") != nullptr) read_post_processor(part("post_processor"), plan);
  read_model(part("model"), plan);
  if (const Json* added = file.find("added_tokens")) read_added(*added, plan);
  return plan;
}

}  // namespace kvkeep::lm::detail
