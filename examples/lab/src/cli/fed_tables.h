// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tables of kvkeep perplexity and kvkeep fidelity: how well each policy predicted the texts that it was fed, and how
// far it was from the full cache.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "fed_texts.h"
#include "kvkeep/cli/program.h"

namespace kvkeep::cli {

// One policy, text by text and in total.
struct Measures {
  RatioStrata likelihoods{1}, divergences{1};  // [1][texts] in nats, over the tokens that count
  Strata same_tokens{1};
  report::StreamingPerplexity perplexity;
  report::DecodeFidelity fidelity;
};

class FedResults {
 public:
  // All three must outlive it.
  FedResults(const ContestOptions& options, const std::vector<Contest>& contests,
             const std::vector<Followed>& followed);

  // NLL, perplexity, KL and agreement.
  [[nodiscard]] Table perplexity_table() const;
  // KL and agreement.
  [[nodiscard]] Table fidelity_table() const;
  // The same, a column for each 256 tokens.
  [[nodiscard]] Table bin_table() const;
  // Differences from the policy of --against.
  [[nodiscard]] Table difference_table() const;
  // Everything, for programs: per policy and budget a row for the tokens that count, and one for each 256 tokens.
  [[nodiscard]] Table long_table(Format format) const;
  // Which tokens count, and why.
  [[nodiscard]] std::string counted() const;
  // Prints them. For people: `tables`, and the differences from --against, paired by `unit`. For programs: the long
  // one.
  void show(const OutputOptions& output, const char* unit, const std::function<std::string()>& tables) const;

 private:
  void add_row(Table& table, std::size_t contest, const std::string& part, std::pair<std::int64_t, std::int64_t> tokens,
               const report::Ratio& nll, const report::FidelitySums& from_full, Format format) const;

  const ContestOptions& options_;
  const std::vector<Contest>& contests_;
  const std::vector<Followed>& followed_;
  std::int64_t first_counted_ = 0;  // tokens before it count in no sum, since some policy had not cut yet
  std::int64_t longest_ = 0;        // tokens after a prompt
  std::vector<Measures> measures_;  // [contests]
};

}  // namespace kvkeep::cli
