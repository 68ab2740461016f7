// SPDX-License-Identifier: Apache-2.0
#include <nlohmann/json.hpp>

#include "kvkeep/core/error.h"
#include "kvkeep/io/untrusted_json.h"
#include "tokenizer_plan.h"

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

  [[nodiscard]] std::int64_t count(const char* field) const {
    const Json& found = at(field, "a number");
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
  if (model.truth("byte_fallback", false)) plan.alphabet = Alphabet::characters;
  plan.ignore_merges = model.truth("ignore_merges", false);
  plan.fuse_unknown = model.truth("fuse_unk", false);
  if (model.find("unk_token") != nullptr) plan.unknown = model.word("unk_token");
  read_vocabulary(model, plan);
  const Json& merges = model.list("merges");
  plan.merges.reserve(merges.size());
  for (const Json& merge : merges) {
    plan.merges.push_back(merge_of(merge, plan.where));
    plan.merges.back().rank = static_cast<std::uint32_t>(plan.merges.size() - 1);
  }
}

/// The members of a "Sequence", or the part itself if it is not one.
std::vector<Part> sequence(const Part& part, const char* members) {
  if (part.word("type") != "Sequence") return {part};
  std::vector<Part> parts;
  for (const Json& member : part.list(members)) parts.emplace_back(member, part.name());
  return parts;
}

/// {"String": ...} or {"Regex": ...}; empty if it is the other.
std::string_view pattern_of(const Part& part, const char* kind) {
  const Part pattern = part.part("pattern");
  return pattern.find(kind) != nullptr ? std::string_view(pattern.word(kind)) : std::string_view();
}

bool replaces(const Part& part, std::string_view what, std::string_view by) {
  return pattern_of(part, "String") == what && part.word("content") == by;
}

// In this order, each at most once.
void read_normalizer(const Part& normalizer, TokenizerPlan& plan) {
  constexpr const char* kAllowed =
      "NFC, and with byte_fallback a Replace of blanks by U+2581, or a Prepend of it before";
  Spelling& known = plan.normalizer;
  for (const Part& part : sequence(normalizer, "normalizers")) {
    const std::string& type = part.word("type");
    const bool untouched = !known.blanks && known.prefix == Prefix::none;
    const bool pieces = plan.alphabet == Alphabet::characters && !known.blanks;
    if (type == "NFC" && untouched && !known.nfc)
      known.nfc = true;
    else if (type == "Prepend" && pieces && untouched && part.word("prepend") == Spelling::kBlank)
      known.prefix = Prefix::always;
    else if (type == "Replace" && pieces && replaces(part, " ", Spelling::kBlank))
      known.blanks = true;
    else
      part.only("type", false, kAllowed);
  }
  normalizer.only("type", known.blanks || known.prefix == Prefix::none, kAllowed);
}

// Where blanks are written as U+2581 and a text is cut at them, if not by the normalizer.
void read_metaspace(const Part& pre, TokenizerPlan& plan) {
  const std::vector<Part> parts = sequence(pre, "pretokenizers");
  const Part& part = parts.empty() ? pre : parts.front();
  const std::string& type = part.word("type");
  // After the normalizer no such blank is left.
  const bool cuts_nothing =
      type == "Split" && plan.normalizer.blanks && pattern_of(part, "String") == " " && !part.truth("invert", false);
  part.only("type", parts.size() == 1 && (type == "Metaspace" || cuts_nothing),
            "Metaspace, Split at blanks that the normalizer replaces, or none");
  if (cuts_nothing) return;
  part.only("replacement", part.word("replacement") == Spelling::kBlank, "U+2581");
  const std::string scheme = part.find("prepend_scheme") != nullptr ? part.word("prepend_scheme")
                             : part.truth("add_prefix_space", true) ? "always"
                                                                    : "never";
  if (scheme != "always" && scheme != "first" && scheme != "never")
    part.only("prepend_scheme", false, "always, first or never");
  plan.metaspace = {.blanks = true,
                    .prefix = scheme == "always"  ? Prefix::unless_blank
                              : scheme == "first" ? Prefix::first
                                                  : Prefix::none};
  if (part.truth("split", true)) plan.cuts = {kBlankLed};
}

// Bytes and blanks are what the alphabet says; all that a file may choose is whether a blank in front is left out.
void read_decoder(const Part& decoder, TokenizerPlan& plan) {
  if (plan.alphabet == Alphabet::bytes) {
    decoder.only("type", decoder.word("type") == "ByteLevel", "ByteLevel");
    return;
  }
  const std::vector<Part> parts = sequence(decoder, "decoders");
  const auto is = [&](std::size_t i, const char* type) { return i < parts.size() && parts[i].word("type") == type; };
  plan.strips_blank = parts.size() == 4 && is(3, "Strip") && parts[3].word("content") == " " &&
                      parts[3].count("start") == 1 && parts[3].count("stop") == 0;
  decoder.only(
      "type",
      is(0, "Replace") && replaces(parts[0], Spelling::kBlank, " ") && is(1, "ByteFallback") && is(2, "Fuse") &&
          (parts.size() == 3 || plan.strips_blank),
      "a Sequence of Replace (U+2581 by a blank), ByteFallback, Fuse and, or not, Strip (a blank at the start)");
}

// Bytes: the expressions by which words are cut, the last of them ByteLevel's own.
void read_cuts(const Part& pre, TokenizerPlan& plan) {
  const std::vector<Part> parts = sequence(pre, "pretokenizers");
  std::vector<std::string> types;
  bool bytes_last = false, known = true;
  for (const Part& part : parts) {
    const std::string& type = part.word("type");
    types.push_back(io::shown(type));
    bytes_last = type == "ByteLevel";
    if (bytes_last) {
      if (part.truth("add_prefix_space", true)) part.only("add_prefix_space", false, "false");
      if (part.truth("use_regex", true)) plan.cuts.push_back(kGpt2Words);
    } else if (type == "Digits" && part.truth("individual_digits", false)) {
      plan.cuts.push_back(kDigit);
    } else if (type == "Split" && part.word("behavior") == "Isolated" && !part.truth("invert", false)) {
      plan.cuts.push_back(pattern_of(part, "Regex"));
    } else {
      known = false;
    }
  }
  KVKEEP_REQUIRE_AS(Unsupported, known && bytes_last && is_word_cut(plan.cuts), "read tokenizer: ", pre.name(), " is [",
                    shortened(joined(types)), "] and cuts words by [",
                    shortened(joined(plan.cuts, [](std::string_view cut) { return io::shown(cut); })),
                    "]; allowed what is known as ", word_cut_names());
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
    added.token.id = static_cast<std::int32_t>(token.count("id"));
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
  const auto read = [&](const char* field, auto&& reads) {
    if (file.find(field) != nullptr) reads(part(field), plan);
  };
  read_model(part("model"), plan);
  read("normalizer", read_normalizer);
  if (plan.alphabet == Alphabet::bytes) {
    read_cuts(part("pre_tokenizer"), plan);
  } else {
    read("pre_tokenizer", read_metaspace);
    KVKEEP_REQUIRE_AS(Unsupported, plan.normalizer.blanks || plan.metaspace.blanks, "read tokenizer: ", where,
                      " has byte_fallback and keeps blanks as they are; allowed a normalizer or pre_tokenizer that "
                      "writes them as U+2581");
    plan.strips_blank = plan.normalizer.prefix != Prefix::none || plan.metaspace.prefix != Prefix::none;
  }
  read("decoder", read_decoder);
  read("post_processor", read_post_processor);
  if (const Json* added = file.find("added_tokens")) read_added(*added, plan);
  return plan;
}

}  // namespace kvkeep::lm::detail
