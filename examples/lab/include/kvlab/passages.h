// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Documents with questions about them, for ruler/qa-1 and ruler/qa-2. Does not use LibTorch.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace kvkeep::lm {

struct PassageQuestion {
  std::string question;
  std::vector<std::string> answers;    ///< spellings of one answer
  std::vector<std::size_t> own = {};   ///< documents that belong to the question: SQuAD one, HotpotQA ten
  std::vector<std::size_t> near = {};  ///< SQuAD: the other paragraphs of the same article
};

enum class PassageForm : std::uint8_t { squad, hotpotqa };

struct Passages {
  PassageForm form = PassageForm::squad;
  std::vector<std::string> documents;  ///< none twice, in the order of the file; HotpotQA: title, line end, sentences
  std::vector<PassageQuestion> questions;  ///< SQuAD: without those that cannot be answered
};

/// Reads SQuAD (1.1 or 2.0: {"data": [{"paragraphs": [{"context", "qas": [{"question", "answers": [{"text"}],
/// "is_impossible"}]}]}]}) or HotpotQA ([{"question", "answer", "context": [[title, [sentence]]]}]) as published.
/// `where` names the file in messages. Throws InvalidArgument for text that is neither, with the place of the first
/// field that is missing or of another type, and for a file without questions. Cost: O(text).
[[nodiscard]] Passages read_passages(std::string_view json, const std::string& where);

}  // namespace kvkeep::lm
