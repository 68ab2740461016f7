// SPDX-License-Identifier: Apache-2.0
#include "fed_texts.h"

#include <CLI/Option.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <deque>
#include <memory>
#include <numeric>

#include "kvlab/generation.h"
#include "oracle.h"

namespace kvkeep::cli {
namespace {

lm::Request request_of(const FedText& text) {
  return {.prompt = text.prompt, .new_tokens = static_cast<std::int32_t>(text.tokens.size()), .forced = text.tokens};
}

// Logits of the full cache for one text, until every policy has reached them.
class FullRows {
 public:
  void push(std::span<const float> logits) { rows_.emplace_back(logits.begin(), logits.end()); }
  [[nodiscard]] std::span<const float> at(std::size_t token) const { return rows_[token - dropped_]; }
  void drop_before(std::size_t token) {
    for (; dropped_ < token; ++dropped_) rows_.pop_front();
  }

 private:
  std::deque<std::vector<float>> rows_;
  std::size_t dropped_ = 0;
};

// Some texts under all policies.
class Group {
 public:
  Group(lm::Decoder& decoder, const ModelOptions& model, const std::vector<Contest>& contests,
        std::span<const FedText> texts, std::optional<std::int64_t> traced)
      : contests_(contests), texts_(texts), rows_(texts.size()), foretold_(contests.size()), order_(contests.size()) {
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    const auto full = std::ranges::find_if(contests, &Contest::keeps_all) - contests.begin();
    std::rotate(order_.begin(), order_.begin() + full, order_.begin() + full + 1);
    for (std::vector<std::vector<Foretold>>& own : foretold_) own.resize(texts.size());
    if (traced) watched_.emplace(decoder, model, contests, *traced);
    for (std::size_t c = 0; c < contests.size(); ++c) {
      std::unique_ptr<KVPolicy> policy = make_untold(contests[c].policy);
      lm::GeneratorOptions options{.places = static_cast<std::int64_t>(texts.size()),
                                   .cache_dtype = model.dtype(),
                                   .accelerator = model.device.accelerator()};
      for (const FedText& text : texts)
        options.capacity =
            std::max(options.capacity, lm::slots_needed(decoder.spec(), policy->trigger(), request_of(text)));
      options.hooks.on_logits = [this, c](SequenceId text, std::span<const float> logits) {
        see(c, static_cast<std::size_t>(text), logits);
      };
      if (watched_) options.hooks.on_event = watched_->hook(c);
      generators_.push_back(std::make_unique<lm::Generator>(decoder, std::move(policy), std::move(options)));
    }
  }

  void run(Progress& progress) {
    run_prompts();
    const auto step = [&](std::size_t c) {
      const bool went = generators_[c]->step();
      if (went) progress.advance(static_cast<std::int64_t>(texts_.size()));
      return went;
    };
    // The full cache goes first and never waits, so no policy is ahead of it. A policy that runs its own prompt is a
    // step or two behind.
    while (std::ranges::count_if(order_, step) > 0)
      for (std::size_t i = 0; i < texts_.size(); ++i) {
        std::size_t all = texts_[i].tokens.size();
        for (const auto& own : foretold_) all = std::min(all, own[i].size());
        rows_[i].drop_before(all);
      }
  }

  void add_to(std::vector<Followed>& all, std::vector<Diagnosed>& diagnosed, Progress& progress) {
    for (std::size_t c = 0; c < contests_.size(); ++c) {
      all[c].reads += generators_[c]->keeper().totals().reads;
      for (std::size_t i = 0; i < texts_.size(); ++i) {
        const lm::Completion done = generators_[c]->leave(static_cast<SequenceId>(i));
        Followed& to = all[c];
        to.texts.push_back(std::move(foretold_[c][i]));
        to.counts.add(done);
        to.kept_bytes = std::max(to.kept_bytes, done.kept_bytes);
        if (!done.events.empty())
          to.before_events = std::max(to.before_events, std::int64_t{done.events.front().step} + 1);
        if (watched_) watched_->fed(c, static_cast<SequenceId>(i), request_of(texts_[i]), done);
      }
      generators_[c].reset();  // full runs take memory too
    }
    if (watched_) watched_->end(progress, diagnosed);
  }

 private:
  // Sequences of a generator are named in the order of the texts.
  void run_prompts() {
    for (const FedText& text : texts_) {
      std::vector<lm::Generator*> sharing;
      for (const std::size_t c : order_)
        if (contests_[c].narrows)
          static_cast<void>(generators_[c]->join(request_of(text)));
        else
          sharing.push_back(generators_[c].get());
      const lm::PromptRun prompt = lm::Generator::run_prompt(sharing, request_of(text));
      for (std::size_t g = 0; g < sharing.size(); ++g) sharing[g]->begin(prompt.sequences[g], prompt);
    }
  }

  void see(std::size_t contest, std::size_t text, std::span<const float> logits) {
    std::vector<Foretold>& seen = foretold_[contest][text];
    const std::int32_t token = texts_[text].tokens[seen.size()];
    if (contest == order_.front()) rows_[text].push(logits);
    seen.push_back(
        {report::negative_log_likelihood(logits, token), report::departure(rows_[text].at(seen.size()), logits)});
  }

  const std::vector<Contest>& contests_;
  std::span<const FedText> texts_;
  std::vector<FullRows> rows_;                                // [texts]
  std::vector<std::vector<std::vector<Foretold>>> foretold_;  // [contests][texts][tokens so far]
  std::vector<std::size_t> order_;                            // of the contests, the full cache first
  std::optional<WatchedTexts> watched_;                       // with --diagnostics
  std::vector<std::unique_ptr<lm::Generator>> generators_;    // [contests]
};

}  // namespace

void FedDiagnostics::add(CLI::App& app) {
  app.add_flag("--diagnostics", wanted, "show how kept sets change over time, and what attention loses");
  app.add_option("--diagnostics-samples", traced,
                 "texts for recall and output error: a full attention of every token, which takes long; 0: none")
      ->check(CLI::Range(0, 1 << 24))
      ->option_text("N [1]");
}

std::vector<Contest> fed_contests(ContestOptions& options, std::int32_t tokens) {
  options.cut_prompts = true;
  std::vector<std::string>& policies = options.policies;
  const auto is_full = [](const std::string& written) { return PolicyText(written).name() == "full"; };
  if (!policies.empty() && std::ranges::none_of(policies, is_full)) policies.insert(policies.begin(), "full");
  std::vector<Contest> all =
      contests(options, {"full", "streaming", "tova", "ams-tova", "snapkv"}, {tokens / 4, tokens / 8});
  for (const Contest& contest : all) static_cast<void>(make_untold(contest.policy));
  return all;
}

std::vector<Followed> follow(lm::Decoder& decoder, const ModelOptions& model, const std::vector<Contest>& contests,
                             std::span<const FedText> texts, std::int32_t batch, Progress& progress,
                             const FedDiagnostics& diagnostics) {
  std::vector<Followed> all(contests.size());
  std::vector<Diagnosed> diagnosed;
  for (std::size_t first = 0; first < texts.size(); first += static_cast<std::size_t>(batch)) {
    const std::size_t some = std::min(static_cast<std::size_t>(batch), texts.size() - first);
    progress.label(text("texts ", first + 1, "-", first + some, " of ", texts.size()));
    const auto traced = std::clamp<std::int64_t>(diagnostics.traced - static_cast<std::int64_t>(first), 0,
                                                 static_cast<std::int64_t>(some));
    Group group(decoder, model, contests, texts.subspan(first, some),
                diagnostics.wanted ? std::optional(traced) : std::nullopt);
    group.run(progress);
    group.add_to(all, diagnosed, progress);
  }
  for (std::size_t c = 0; c < diagnosed.size(); ++c) {
    diagnosed[c].gaps.repetition = "texts are fed, so the policy wrote nothing";
    all[c].diagnosed = std::move(diagnosed[c]);
  }
  return all;
}

}  // namespace kvkeep::cli
