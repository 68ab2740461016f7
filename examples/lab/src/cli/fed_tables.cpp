// SPDX-License-Identifier: Apache-2.0
#include "fed_tables.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <utility>

#include "kvkeep/core/error.h"

namespace kvkeep::cli {
namespace {

constexpr Scale kNats{.factor = 1, .digits = 4};

Measures measure(const Followed& followed, std::int64_t first_counted) {
  Measures all{.perplexity = report::StreamingPerplexity(first_counted),
               .fidelity = report::DecodeFidelity(first_counted)};
  for (const std::vector<Foretold>& tokens : followed.texts) {
    report::StreamingPerplexity perplexity(first_counted);
    report::DecodeFidelity fidelity(first_counted);
    for (const Foretold& token : tokens) {
      perplexity.add(token.negative_log_likelihood);
      fidelity.add(token.departure);
    }
    all.likelihoods[0].push_back(perplexity.total());
    all.divergences[0].push_back(fidelity.total().divergence);
    all.same_tokens[0].push_back(fidelity.total().same_token);
    all.perplexity.merge(perplexity);
    all.fidelity.merge(fidelity);
  }
  return all;
}

double share_of(const report::Answers& answers) { return share(answers.right, answers.asked); }

// Of exp(mean): exp keeps the order, so the bounds of the mean become those of the perplexity.
report::Interval perplexity_interval(const Measures& m) {
  const report::Interval nats = report::bootstrap(m.likelihoods);
  return {std::exp(nats.low), std::exp(nats.high)};
}

// The tokens of a bin, both ends included, if the longest text has `longest` tokens.
std::pair<std::int64_t, std::int64_t> bounds(std::size_t bin, std::int64_t longest) {
  const auto first = static_cast<std::int64_t>(bin) * report::kFidelityBin;
  return {first, std::min(first + report::kFidelityBin, longest) - 1};
}

// Appends a mean or a share and its interval, as numbers for programs.
void put(std::vector<Cell>& row, double value, const report::Interval& interval) {
  for (const double number : {value, interval.low, interval.high}) row.push_back(real_cell(number, 6));
}

void put(std::vector<Cell>& row, const Difference& d) { put(row, d.value, d.interval); }

}  // namespace

FedResults::FedResults(const ContestOptions& options, const std::vector<Contest>& contests,
                       const std::vector<Followed>& followed)
    : options_(options), contests_(contests), followed_(followed) {
  for (const Followed& one : followed) first_counted_ = std::max(first_counted_, one.before_events);
  for (const std::vector<Foretold>& tokens : followed.front().texts)
    longest_ = std::max(longest_, static_cast<std::int64_t>(tokens.size()));
  for (const Followed& one : followed) measures_.push_back(measure(one, first_counted_));
}

Table FedResults::perplexity_table() const {
  Table table(contest_columns(options_, {{"nll", "NLL"},
                                         {"perplexity", "perplexity (95 %)"},
                                         {"kl", "KL from full"},
                                         {"same_token", "same token"},
                                         {"tokens", "tokens"},
                                         {"events", "events"},
                                         {"chosen", "chosen"},
                                         {"kept_bytes", "kept"}}));
  for (std::size_t c = 0; c < contests_.size(); ++c) {
    const Measures& m = measures_[c];
    const report::Ratio& total = m.perplexity.total();
    table.add(
        contest_cells(options_, contests_[c],
                      {real_cell(total.value(), kNats.digits),
                       with_interval(report::perplexity(total), perplexity_interval(m), {.factor = 1, .digits = 3}),
                       real_cell(m.fidelity.total().divergence.value(), kNats.digits),
                       share_cell(share_of(m.fidelity.total().same_token)), m.fidelity.total().same_token.asked,
                       followed_[c].counts.events, followed_[c].counts.chosen(), bytes_cell(followed_[c].kept_bytes)}));
  }
  return table;
}

Table FedResults::fidelity_table() const {
  Table table(contest_columns(options_, {{"kl", "KL from full (95 %)"},
                                         {"same_token", "same token % (95 %)"},
                                         {"tokens", "tokens"},
                                         {"events", "events"},
                                         {"chosen", "chosen"},
                                         {"kept_bytes", "kept"}}));
  for (std::size_t c = 0; c < contests_.size(); ++c) {
    const Measures& m = measures_[c];
    const report::FidelitySums& total = m.fidelity.total();
    table.add(contest_cells(
        options_, contests_[c],
        {with_interval(total.divergence.value(), report::bootstrap(m.divergences), kNats),
         with_interval(share_of(total.same_token), report::bootstrap(m.same_tokens)), total.same_token.asked,
         followed_[c].counts.events, followed_[c].counts.chosen(), bytes_cell(followed_[c].kept_bytes)}));
  }
  return table;
}

Table FedResults::bin_table() const {
  std::vector<Column> columns;
  for (std::size_t bin = 0; bin < measures_.front().fidelity.bins().size(); ++bin) {
    const auto [first, last] = bounds(bin, longest_);
    columns.push_back({text(first), text(first, "-", last)});
  }
  Table table(contest_columns(options_, columns));
  for (std::size_t c = 0; c < contests_.size(); ++c) {
    std::vector<Cell> cells;
    for (const report::FidelitySums& bin : measures_[c].fidelity.bins())
      cells.emplace_back(text(real_cell(bin.divergence.value(), kNats.digits).shown, ", ",
                              share_cell(share_of(bin.same_token)).shown));
    table.add(contest_cells(options_, contests_[c], cells));
  }
  return table;
}

Table FedResults::difference_table() const {
  Table table(contest_columns(options_, {{"against", "against", false},
                                         {"nll", "NLL (95 %)"},
                                         {"kl", "KL (95 %)"},
                                         {"same_token", "same token, points (95 %)"}}));
  for (std::size_t c = 0; c < contests_.size(); ++c) {
    if (!contests_[c].against || contests_[c].against == c) continue;
    const Measures &ours = measures_[c], &theirs = measures_[*contests_[c].against];
    table.add(contest_cells(
        options_, contests_[c],
        {contests_[*contests_[c].against].shown(), difference(ours.likelihoods, theirs.likelihoods).shown(kNats),
         difference(ours.divergences, theirs.divergences).shown(kNats),
         difference(ours.same_tokens, theirs.same_tokens).shown()}));
  }
  return table;
}

Table FedResults::long_table(Format format) const {
  std::vector<Column> columns;
  const auto add_columns = [&](std::initializer_list<const char*> keys) {
    for (const char* key : keys) columns.push_back({key, key});
  };
  const auto add_measures = [&](const std::string& ending) {
    for (const char* measure : {"nll", "kl", "same_token"})
      for (const char* end : {"", "_low", "_high"}) columns.push_back({measure + ending + end, ""});
  };
  add_columns({"part", "first_token", "last_token", "texts", "tokens", "perplexity"});
  add_measures("");
  add_columns({"events", "chosen", "kept_bytes", "against", "against_budget"});
  add_measures("_difference");
  const bool diagnosed = followed_.front().diagnosed.has_value();
  if (diagnosed) append(columns, diagnostics_columns(format));
  add_columns({"resolved"});
  Table table(contest_columns(options_, columns));
  for (std::size_t c = 0; c < contests_.size(); ++c) {
    const Measures& m = measures_[c];
    add_row(table, c, "counted", {first_counted_, longest_ - 1}, m.perplexity.total(), m.fidelity.total(), format);
    for (std::size_t bin = 0; bin < m.fidelity.bins().size(); ++bin)
      add_row(table, c, "bin", bounds(bin, longest_), m.perplexity.curve()[bin], m.fidelity.bins()[bin], format);
  }
  return table;
}

// Intervals and differences cover only the tokens that count.
void FedResults::add_row(Table& table, std::size_t c, const std::string& part,
                         std::pair<std::int64_t, std::int64_t> tokens, const report::Ratio& nll,
                         const report::FidelitySums& from_full, Format format) const {
  const Measures& m = measures_[c];
  const bool counted = part == "counted";
  const auto interval = [&](const auto& samples) {
    return counted ? report::bootstrap(samples) : report::Interval{std::nan(""), std::nan("")};
  };
  std::vector<Cell> row{part,
                        tokens.first,
                        tokens.second,
                        static_cast<std::int64_t>(followed_[c].texts.size()),
                        from_full.same_token.asked,
                        real_cell(report::perplexity(nll), 6)};
  put(row, nll.value(), interval(m.likelihoods));
  put(row, from_full.divergence.value(), interval(m.divergences));
  put(row, share_of(from_full.same_token), interval(m.same_tokens));
  append(row, {followed_[c].counts.events, followed_[c].counts.chosen(), bytes_cell(followed_[c].kept_bytes)});
  if (counted && contests_[c].against) {
    const Contest& reference = contests_[*contests_[c].against];
    const Measures& theirs = measures_[*contests_[c].against];
    append(row, {reference.policy.label(), reference.budget});
    put(row, difference(m.likelihoods, theirs.likelihoods));
    put(row, difference(m.divergences, theirs.divergences));
    put(row, difference(m.same_tokens, theirs.same_tokens));
  } else {
    constexpr std::size_t kDifferences = 11;
    row.insert(row.end(), kDifferences, Cell(nullptr, "-"));
  }
  if (const std::optional<Diagnosed>& diagnosed = followed_[c].diagnosed)
    append(row, counted ? diagnostics_cells(*diagnosed, format) : diagnostics_cells(nullptr, format));
  row.emplace_back(contests_[c].resolved);
  table.add(contest_cells(options_, contests_[c], row));
}

std::string FedResults::counted() const {
  if (first_counted_ == 0) return "All tokens after the prompts count.\n";
  const auto last = std::ranges::max_element(followed_, {}, &Followed::before_events) - followed_.begin();
  return text("The first ", first_counted_,
              " tokens after a prompt count for no policy: the latest first event, that of ",
              contests_[static_cast<std::size_t>(last)].shown(), ", comes after them.\n");
}

void FedResults::show(const OutputOptions& output, const char* unit, const std::function<std::string()>& tables) const {
  for (std::size_t c = 0; c < contests_.size(); ++c)
    note_events(contests_[c], followed_[c].counts, followed_[c].reads, "texts", output.quiet);
  if (output.format != Format::md) return print(long_table(output.format).text(output.format));
  std::string out = tables();
  if (!options_.against.empty())
    out += text("\nAbove ", PolicyText(options_.against).label(), ", paired bootstrap over ", unit, ":\n\n",
                difference_table().markdown());
  if (followed_.front().diagnosed) {
    std::vector<Diagnosed> diagnosed;
    for (const Followed& one : followed_) diagnosed.push_back(*one.diagnosed);
    out += text("\nDiagnostics, all ", unit, ":\n\n", diagnostics_section(options_, contests_, diagnosed));
  }
  print(out);
}

}  // namespace kvkeep::cli
