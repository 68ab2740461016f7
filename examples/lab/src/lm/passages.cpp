// SPDX-License-Identifier: Apache-2.0
#include "kvlab/passages.h"

#include <map>
#include <nlohmann/json.hpp>

#include "kvkeep/core/error.h"
#include "kvkeep/io/untrusted_json.h"

namespace kvkeep::lm {
namespace {

using nlohmann::json;

/// A value with its place, "data[3].paragraphs[0]".
class Place {
 public:
  Place(const json& value, const std::string& where, std::string path)
      : value_(value), where_(where), path_(std::move(path)) {}

  [[nodiscard]] Place at(const char* key) const {
    require(value_.is_object() && value_.contains(key), text("no object with a field ", key));
    return {value_[key], where_, path_ + (path_.empty() ? "" : ".") + key};
  }
  template <class Take>
  void each(Take take) const {
    require(value_.is_array(), "no list");
    for (std::size_t i = 0; i < value_.size(); ++i) take(Place(value_[i], where_, text(path_, "[", i, "]")));
  }
  [[nodiscard]] Place item(std::size_t i) const {
    require(value_.is_array() && value_.size() > i, text("no list of more than ", i));
    return {value_[i], where_, text(path_, "[", i, "]")};
  }
  [[nodiscard]] const std::string& string() const {
    require(value_.is_string() && !value_.get_ref<const std::string&>().empty(), "no text");
    return value_.get_ref<const std::string&>();
  }
  [[nodiscard]] bool truth(const char* key) const {
    return value_.is_object() && value_.contains(key) && value_[key] == true;
  }

 private:
  void require(bool holds, const std::string& what) const {
    KVKEEP_REQUIRE(holds, "read passages: ", path_.empty() ? "the file" : path_, " of ", where_, " is ", what,
                   "; given ", io::shown(value_), "; allowed SQuAD's or HotpotQA's JSON as published");
  }

  const json& value_;
  const std::string& where_;
  std::string path_;
};

/// Documents, none twice.
class Documents {
 public:
  explicit Documents(std::vector<std::string>& to) : to_(to) {}
  std::size_t add(std::string document) {
    const auto [at, is_new] = places_.try_emplace(std::move(document), to_.size());
    if (is_new) to_.push_back(at->first);
    return at->second;
  }

 private:
  std::vector<std::string>& to_;
  std::map<std::string, std::size_t> places_;
};

void read_squad(const Place& file, Passages& to) {
  Documents documents(to.documents);
  file.at("data").each([&](const Place& article) {
    std::vector<std::size_t> all;
    const std::size_t first = to.questions.size();
    article.at("paragraphs").each([&](const Place& paragraph) {
      all.push_back(documents.add(paragraph.at("context").string()));
      paragraph.at("qas").each([&](const Place& asked) {
        if (asked.truth("is_impossible")) return;
        PassageQuestion& one = to.questions.emplace_back();
        one.question = asked.at("question").string();
        one.own = {all.back()};
        asked.at("answers").each([&](const Place& answer) { one.answers.push_back(answer.at("text").string()); });
        static_cast<void>(asked.at("answers").item(0));
      });
    });
    for (std::size_t q = first; q < to.questions.size(); ++q)
      for (const std::size_t document : all)
        if (document != to.questions[q].own.front()) to.questions[q].near.push_back(document);
  });
}

void read_hotpotqa(const Place& file, Passages& to) {
  Documents documents(to.documents);
  file.each([&](const Place& asked) {
    PassageQuestion& one = to.questions.emplace_back();
    one.question = asked.at("question").string();
    one.answers = {asked.at("answer").string()};
    asked.at("context").each([&](const Place& document) {
      std::string said = document.item(0).string() + "\n";
      document.item(1).each([&](const Place& sentence) { said += sentence.string(); });
      one.own.push_back(documents.add(std::move(said)));
    });
    static_cast<void>(asked.at("context").item(0));
  });
}

}  // namespace

Passages read_passages(std::string_view content, const std::string& where) {
  const json parsed = io::read_json(content, "read passages: " + where);
  const Place file(parsed, where, "");
  Passages passages;
  passages.form = parsed.is_array() ? PassageForm::hotpotqa : PassageForm::squad;
  if (parsed.is_array())
    read_hotpotqa(file, passages);
  else
    read_squad(file, passages);
  KVKEEP_REQUIRE(!passages.questions.empty(), "read passages: ", where,
                 " has no question that can be answered; given none; allowed one or more");
  return passages;
}

}  // namespace kvkeep::lm
