// SPDX-License-Identifier: Apache-2.0
// Continuous batching over a fixed number of pages, with and without kvkeep: prefixes are shared, sequences grow, are
// cut, finish, are aborted or preempted. See --help.

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <regex>
#include <string>
#include <vector>

#include "kvkeep/io/run_files.h"
#include "kvkeep/kvkeep.h"
#include "kvkeep/torch.h"
#include "kvlab/generation.h"
#include "kvlab/text_model.h"
#include "kvlab/text_tasks.h"

namespace {

using kvkeep::SequenceId;
using Ints = std::vector<std::int32_t>;

constexpr const char* kHelp = R"(example_serving: what a policy buys an engine whose cache is a fixed number of pages.

Requests arrive at random (Poisson). Most begin with one of a few prompt prefixes, whose pages they share; each then
decodes its own number of tokens. A step runs every request that has arrived and has pages. When pages run out, the
newest request is preempted: it returns to the head of the queue. The same requests are served for each size of the
pool by
  engine      without kvkeep, at its best: the pages of a preempted request stay until others need them, so that
              only what they took is computed again
  restricted  without eviction, but with what the first --policy asks of the engine: kvkeep sees the queries of every
              layer and checks every step, and a preempted request is computed again after its prefix
  POLICY      each --policy: the same restrictions, and eviction

  example_serving                                    random prompts for the shipped model, the table on stdout
  example_serving --steps steps.csv                  also the pages in use after every step; to draw them:
                                                     examples/lab/plots/plot_serving.py steps.csv serving.png
  example_serving --model SmolLM2.gguf --weights bf16 --haystack prose.txt --pages 960,480,240 --requests 20 \
    --prefix 150:350 --prompt 256:900 --answer 100:240 --policy expected,budget=384 --csv pools.csv
                                                     a pretrained model, prompts that ask for a number in prose, and a
                                                     pool that shrinks; plot_serving.py draws pools.csv, too

  --model PATH        a model folder (Hugging Face layout) or GGUF file  [examples/model, beside this program's sources]
  --weights f32|bf16  what its matrices are widened or rounded to        [as stored; f32 if quantised]
  --policy POLICY     as in `kvkeep policies`; again for further ones    [ams-tova,budget=96,interval=32,recent=16]
  --haystack FILE     prose. Each prompt then hides a number in it; half of the requests end in the question for it, the
                      others are asked after their answer. Without it, prompts are random tokens
  --requests N        how many arrive                                    [64]
  --rate X            arrivals per step, on average                      [0.06]
  --pages N,...       pages in the pool; several are served in turn      [160]
  --page-size N       slots per page, a power of two                     [16]
  --prefixes N        shared prompt prefixes                             [3]
  --prefix A:B        tokens of a prefix, from A to B                    [40:72]
  --prompt A:B        tokens of a prompt after its prefix                [8:40; with --haystack at least 64]
  --answer A:B        tokens of an answer                                [160:640]
  --seed N            everything random follows from it                  [1]
  --rounds N          serve all N times in each pool, in turns; the table then has medians of paces, and the lowest and
                      highest                                            [1]
  --csv FILE          the table, with more columns
  --steps FILE        pages in use, requests running and waiting after each step of the first pool
  --quiet             no progress bar (if stderr is not a terminal, there is none anyway)

How to read the table:
  in flight       requests that have pages, mean over the steps and most
  tokens/s        tokens of answers per second; what is computed again counts as time, not as tokens
  to engine       tokens per second of CPU time, which other processes disturb less, divided by the engine's in the
                  same pool and round: above 1 eviction pays
  steps           until all are served: their ratio is the gain where a step of many costs no more than one of few
  again           tokens computed again after preemptions, as a share of answers' tokens
  same            answers' tokens that the engine without kvkeep writes at the same place
  at once, later  questions answered, of those at the end of a prompt and of those after an answer
Everything but the two paces follows from the seed.
)";

struct Range {
  std::int32_t first = 0, last = 0;
};

struct Options {
  std::string model = KVKEEP_EXAMPLE_MODEL, weights, haystack, csv, steps;
  std::vector<std::string> policies;
  Ints pages;
  std::int32_t requests = 64, page_size = 16, prefixes = 3;
  Range prefix{40, 72}, prompt{8, 40}, answer{160, 640};
  double rate = 0.06;
  std::uint32_t seed = 1;
  std::int32_t rounds = 1;
  bool quiet = false;
};

/// One request: what arrives, when, and its answer so far.
struct Request {
  SequenceId id = 0;
  std::int32_t arrives = 0;  ///< step
  std::int32_t prefix = -1;  ///< which shared prefix its prompt begins with; -1: none
  Ints prompt;               ///< prefix included
  std::int32_t new_tokens = 0;
  std::int32_t aborted_after = 0;  ///< tokens after which its user leaves; 0: never
  Ints question = {};              ///< fed after the answer; empty: none, or it ends the prompt
  std::string asked_for = {};      ///< what the answer to the question must hold; empty: nothing is asked
  Ints answer = {};                ///< and after it the question and the answer to that
  std::int32_t computed = 0;       ///< tokens of prompt and answer that the cache has seen
  std::int32_t most_computed = 0;  ///< before it was preempted

  [[nodiscard]] std::int32_t all_tokens() const { return static_cast<std::int32_t>(prompt.size() + answer.size()); }
  [[nodiscard]] std::int32_t token(std::int32_t i) const {
    const auto at = static_cast<std::size_t>(i);
    return at < prompt.size() ? prompt[at] : answer[at - prompt.size()];
  }
};

constexpr std::int32_t kReply = 16;  ///< tokens in which a question is to be answered

struct Workload {
  std::vector<Ints> prefixes;
  std::vector<Request> requests;
};

/// The same on every machine, which std:: distributions are not.
class Random {
 public:
  explicit Random(std::uint32_t seed) : bits_(seed) {}
  double unit() { return (bits_() + 0.5) / 4294967296.0; }
  std::int32_t in(Range range) {
    return range.first + static_cast<std::int32_t>(unit() * (range.last - range.first + 1));
  }
  Ints ids(std::int32_t n, std::int32_t vocab) {
    Ints ids(static_cast<std::size_t>(n));
    for (std::int32_t& id : ids) id = in({0, vocab - 1});
    return ids;
  }

 private:
  std::mt19937 bits_;
};

/// Prompts in words: prose that hides a number, and the question for it.
class Prose {
 public:
  explicit Prose(const Options& o) : text_(kvkeep::lm::TextModel::open(o.model)) {
    std::ifstream in(o.haystack, std::ios::binary);
    prose_.assign(std::istreambuf_iterator<char>(in), {});
    KVKEEP_REQUIRE(!prose_.empty(), o.haystack, " cannot be read or is empty; allowed a file of prose");
  }

  /// The first tokens of the prose from a random place on.
  Ints ids(std::int32_t n, Random& random) {
    Ints ids = encode(from(random.unit()));
    KVKEEP_REQUIRE(static_cast<std::size_t>(n) <= ids.size(), "the prose has ", ids.size(), " tokens; allowed ", n,
                   " or more");
    ids.resize(static_cast<std::size_t>(n));
    return ids;
  }

  void ask(Request& request, std::int32_t length, bool at_once, Random& random) {
    const std::string prose = from(random.unit());
    const auto count = [&](std::string_view said) { return static_cast<std::int64_t>(encode(said).size()); };
    const kvkeep::lm::TextSample sample = kvkeep::lm::make_text_task(
        "text/needle", static_cast<std::uint64_t>(request.id), count, {.length = length + kReply, .haystack = prose});
    const Ints context = encode(sample.context),
               question = text_.tokenizer.encode_continuation(sample.question + sample.answer_prefix,
                                                              kvkeep::lm::SpecialTokens::plain);
    request.prompt.insert(request.prompt.end(), context.begin(), context.end());
    if (at_once)
      request.prompt.insert(request.prompt.end(), question.begin(), question.end());
    else
      request.question = question;
    request.asked_for = sample.answers.front();
  }

  [[nodiscard]] bool answered(const Request& request) const {
    const std::size_t before =
        request.question.empty() ? 0 : static_cast<std::size_t>(request.new_tokens) + request.question.size();
    const auto reply = std::span(request.answer).subspan(before);
    const std::string said = text_.tokenizer.decode(reply.first(std::min<std::size_t>(reply.size(), kReply)));
    return said.find(request.asked_for) != std::string::npos;
  }

 private:
  [[nodiscard]] Ints encode(std::string_view said) const {
    return text_.tokenizer.encode(said, kvkeep::lm::SpecialTokens::plain, false);
  }

  /// 64 KiB of the prose, from a word at this share of it on; it starts over at its end.
  [[nodiscard]] std::string from(double share) const {
    const auto begin = static_cast<std::size_t>(share * static_cast<double>(prose_.size()));
    const std::size_t word = std::min(prose_.find_first_of(" \n", begin), prose_.size() - 1);
    return (prose_.substr(word, 65536) + " " + prose_.substr(0, word)).substr(0, 65536);
  }

  kvkeep::lm::TextModel text_;
  std::string prose_;
};

Workload workload_of(const Options& o, std::int32_t vocab, Prose* prose) {
  Random random(o.seed);
  Workload work;
  for (std::int32_t p = 0; p < o.prefixes; ++p) {
    const std::int32_t n = random.in(o.prefix);
    work.prefixes.push_back(prose == nullptr ? random.ids(n, vocab) : prose->ids(n, random));
  }
  double time = 0;
  for (std::int32_t r = 0; r < o.requests; ++r) {
    time -= std::log(random.unit()) / o.rate;
    Request request{.id = r,
                    .arrives = static_cast<std::int32_t>(time),
                    .prefix = random.unit() < 0.8 ? random.in({0, o.prefixes - 1}) : -1,
                    .prompt = {}};
    if (o.prefixes == 0) request.prefix = -1;
    if (request.prefix >= 0) request.prompt = work.prefixes[static_cast<std::size_t>(request.prefix)];
    const std::int32_t length = random.in(o.prompt);
    if (prose != nullptr) {
      prose->ask(request, length, r % 2 == 0, random);
    } else {
      const Ints own = random.ids(length, vocab);
      request.prompt.insert(request.prompt.end(), own.begin(), own.end());
    }
    request.new_tokens = random.in(o.answer);
    // Whoever asks waits for the answer.
    if (prose == nullptr && random.unit() < 0.08) request.aborted_after = random.in({1, request.new_tokens});
    work.requests.push_back(std::move(request));
  }
  return work;
}

/// What one run came to: a row of the table.
struct Numbers {
  std::int64_t finished = 0, aborted = 0, tokens = 0, most_at_once = 0, preempted = 0, again = 0, freed = 0, copies = 0,
               steps = 0, most_pages = 0, page_steps = 0, request_steps = 0;
  double seconds = 0, cpu_seconds = 0;
};

/// A bar on a terminal, nothing elsewhere.
class Bar {
 public:
  Bar(std::string what, std::int64_t all, bool quiet)
      : label_(std::move(what)), total_(all), shown_(!quiet && all > 0 && kvkeep::io::moves_cursor(STDERR_FILENO)) {}
  ~Bar() {
    if (shown_) std::fputs("\r\033[K", stderr);
  }
  void at(std::int64_t done) const {
    if (!shown_) return;
    const auto full = static_cast<std::size_t>(30 * done / total_);
    std::fprintf(stderr, "\r\033[K[%s%s] %3d %%  %s", std::string(full, '#').c_str(),
                 std::string(30 - full, '.').c_str(), static_cast<int>(100 * done / total_), label_.c_str());
  }

 private:
  std::string label_;
  std::int64_t total_;
  bool shown_;
};

/// The engine: queue, pages, steps. The kvkeep part: `keeper_`, `sequences_`, and the lines marked with a number.
class Engine {
 public:
  /// An empty policy: without kvkeep.
  Engine(kvkeep::lm::Decoder& decoder, std::int32_t pages, std::int32_t page_size, const std::string& policy,
         Workload work)
      : decoder_(decoder),
        pool_(pages, page_size),
        sequences_(pool_),
        cache_(decoder.make_pages(pages, page_size)),
        work_(std::move(work)) {
    if (!policy.empty()) {
      keeper_.emplace(decoder.spec(), kvkeep::make_policy(policy),
                      kvkeep::Provided{.output_projections = decoder.output_projections()});
      keeper_->bind(cache_);
    }
    for (std::size_t p = 0; p < work_.prefixes.size(); ++p) hold_prefix(static_cast<std::int32_t>(p));
  }

  /// Called after each step: step, pages in use, requests running, requests waiting.
  using Watch = std::function<void(std::int64_t, std::int64_t, std::int64_t, std::int64_t)>;

  Numbers serve(const Watch& watch) {
    const auto start = std::chrono::steady_clock::now();
    const std::clock_t cpu_start = std::clock();
    std::size_t next = 0;
    for (std::int32_t now = 0; next < work_.requests.size() || !waiting_.empty() || !running_.empty(); ++now) {
      while (next < work_.requests.size() && work_.requests[next].arrives <= now)
        waiting_.push_back(&work_.requests[next++]);
      admit();
      if (!running_.empty()) step();
      const std::int64_t used = pool_.capacity() - pool_.free_pages();
      ++numbers_.steps;
      numbers_.page_steps += used;
      numbers_.request_steps += static_cast<std::int64_t>(running_.size());
      numbers_.most_pages = std::max(numbers_.most_pages, used);
      numbers_.most_at_once = std::max(numbers_.most_at_once, static_cast<std::int64_t>(running_.size()));
      watch(now, used, static_cast<std::int64_t>(running_.size()), static_cast<std::int64_t>(waiting_.size()));
    }
    numbers_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    numbers_.cpu_seconds = static_cast<double>(std::clock() - cpu_start) / CLOCKS_PER_SEC;
    return numbers_;
  }

  [[nodiscard]] std::int64_t done() const { return numbers_.finished + numbers_.aborted; }
  [[nodiscard]] const std::vector<Request>& requests() const { return work_.requests; }

 private:
  static SequenceId prefix_id(std::int32_t prefix) { return -1 - prefix; }

  /// A prefix stays resident: its pages are never cut, only shared.
  void hold_prefix(std::int32_t prefix) {
    const Ints& ids = work_.prefixes[static_cast<std::size_t>(prefix)];
    const auto n = static_cast<std::int32_t>(ids.size());
    KVKEEP_REQUIRE(sequences_.admit(prefix_id(prefix), n).given(), "the prefixes do not fit into ", pool_.capacity(),
                   " pages; allowed a larger --pages");
    const SequenceId id = prefix_id(prefix);
    Ints indptr{0, n}, positions(ids.size()), row{0}, none{0};
    std::iota(positions.begin(), positions.end(), 0);
    decoder_.forward({ids, indptr, positions, row, none}, cache_, sequences_.table({&id, 1}),
                     {.logits = kvkeep::lm::Logits::none});
  }

  [[nodiscard]] std::int32_t prefix_tokens(const Request& request) const {
    return request.prefix < 0 ? 0 : sequences_.length(prefix_id(request.prefix));
  }

  /// Pages that a preempted request still holds beyond its prefix: they are given up before a running one is preempted.
  [[nodiscard]] std::int32_t spare_pages(const Request& request) const {
    return sequences_.knows(request.id) ? static_cast<std::int32_t>(sequences_.pages(request.id).size()) -
                                              prefix_tokens(request) / pool_.page_size()
                                        : 0;
  }

  /// First come, first served, while there are pages for the next one. After a preemption no request comes in until
  /// pages are freed: the one that was just preempted would only be preempted again.
  void admit() {
    std::int32_t promised = 0;  // pages of the requests that come in now
    while (!waiting_.empty() && (!crowded_ || running_.empty())) {
      Request& request = *waiting_.front();
      const bool has_pages = sequences_.knows(request.id);
      const std::int32_t cached = has_pages ? request.computed : prefix_tokens(request);
      std::int32_t there = pool_.free_pages();
      for (const Request* other : waiting_) there += other == &request ? 0 : spare_pages(*other);
      // Each running request leaves one page free beyond its need, since it will grow.
      const std::int32_t wanted = (request.all_tokens() - cached) / pool_.page_size() + 2;
      if (promised + wanted + static_cast<std::int32_t>(running_.size()) > there && !running_.empty()) return;
      promised += wanted;
      if (!has_pages && request.prefix >= 0)
        sequences_.fork(request.id, prefix_id(request.prefix), cached);  // 1. the prefix's pages, shared
      else if (!has_pages)
        static_cast<void>(sequences_.admit(request.id, 0));
      request.computed = cached;
      if (keeper_)
        keeper_->join(request.id, cached, static_cast<std::int32_t>(request.prompt.size()));  // 2. kvkeep is told
      running_.push_back(&request);
      waiting_.pop_front();
    }
  }

  void leave(Request& request) {
    if (keeper_) keeper_->leave(request.id);
    lacking_.erase(request.id);
    sequences_.release(request.id);
    std::erase(running_, &request);
  }

  /// The newest request goes back to the head of the queue. Without kvkeep it holds its pages until they are needed.
  /// With kvkeep they are of no use: after an event its slots are no longer its first tokens.
  void preempt() {
    Request& newest = **std::max_element(running_.begin(), running_.end(),
                                         [](const Request* a, const Request* b) { return a->id < b->id; });
    KVKEEP_REQUIRE_AS(kvkeep::StateError, running_.size() > 1, "request ", newest.id, " alone does not fit into ",
                      pool_.capacity(), " pages; allowed a larger --pages");
    if (keeper_)
      leave(newest);
    else
      std::erase(running_, &newest);
    waiting_.push_front(&newest);
    crowded_ = true;
    ++numbers_.preempted;
  }

  /// Takes the last page of the preempted request that comes in last. False if none has any.
  bool take_spare_page() {
    const auto last =
        std::find_if(waiting_.rbegin(), waiting_.rend(), [&](const Request* r) { return spare_pages(*r) > 0; });
    if (last == waiting_.rend()) return false;
    Request& request = **last;
    const auto whole = static_cast<std::int32_t>(sequences_.pages(request.id).size() - 1) * pool_.page_size();
    request.computed = std::max(whole, prefix_tokens(request));
    if (whole > prefix_tokens(request))
      sequences_.truncate(request.id, whole);
    else
      sequences_.release(request.id);
    return true;
  }

  /// 3. Room for the new tokens of every request; a page that is shared and about to be written is copied first.
  void make_room() {
    std::vector<kvkeep::PageCopy> copies;
    std::map<SequenceId, bool> has_room;
    for (std::size_t i = 0; i < running_.size();) {
      Request& request = *running_[i];
      if (has_room[request.id]) {
        ++i;
        continue;
      }
      const kvkeep::PageGrant grant = sequences_.append(request.id, request.all_tokens() - request.computed);
      if (grant.given()) {
        has_room[request.id] = true;
        copies.insert(copies.end(), grant.copies.begin(), grant.copies.end());
        ++i;
      } else if (!take_spare_page()) {
        preempt();
        i = 0;
      }
    }
    kvkeep::copy_pages(cache_, copies);
    numbers_.copies += static_cast<std::int64_t>(copies.size());
  }

  void step() {
    make_room();
    std::vector<SequenceId> ids;
    Ints tokens, indptr{0}, positions, rows(running_.size()), lengths;
    std::iota(rows.begin(), rows.end(), 0);
    for (Request* request : running_) {
      // The next position is keeper.logical_length(id), whatever was dropped: the tokens computed so far.
      const std::int32_t all = request->all_tokens(), fresh = all - request->computed;
      numbers_.again += std::clamp(request->most_computed - request->computed, 0, fresh);
      for (std::int32_t p = request->computed; p < all; ++p) {
        tokens.push_back(request->token(p));
        positions.push_back(p);
      }
      request->computed = all;
      request->most_computed = std::max(request->most_computed, all);
      ids.push_back(request->id);
      lengths.push_back(sequences_.length(request->id) - fresh);  // slots in use before the step
      indptr.push_back(static_cast<std::int32_t>(tokens.size()));
    }
    const at::Tensor table = sequences_.table(ids);  // 4. the block table
    kvkeep::lm::StepOptions options;
    if (keeper_)
      options.on_layer = [&](const kvkeep::lm::LayerSight& sight) {
        keeper_->observe({.layer = sight.layer,
                          .sequences = ids,
                          .indptr = indptr,
                          .queries = sight.queries,
                          .positions = positions});  // 5. in every layer
      };
    const Ints predicted =
        kvkeep::lm::argmax(decoder_.forward({tokens, indptr, positions, rows, lengths}, cache_, table, options));

    if (keeper_) event(ids);

    const std::vector<Request*> ran = running_;
    for (std::size_t i = 0; i < ran.size(); ++i) write(*ran[i], predicted[i]);
  }

  /// The next token of an answer; after its last one the question comes, or the request leaves.
  void write(Request& request, std::int32_t token) {
    request.answer.push_back(token);
    ++numbers_.tokens;
    const auto said = static_cast<std::int32_t>(request.answer.size());
    if (said == request.new_tokens && !request.question.empty()) {
      request.answer.insert(request.answer.end(), request.question.begin(), request.question.end());
      return;
    }
    const bool finished =
                   said >=
                   request.new_tokens +
                       (request.question.empty() ? 0 : static_cast<std::int32_t>(request.question.size()) + kReply),
               gone = request.aborted_after > 0 && said >= request.aborted_after;
    if (!finished && !gone) return;
    ++(finished ? numbers_.finished : numbers_.aborted);
    leave(request);
    crowded_ = false;
  }

  /// 6. Cuts all sequences that are due, in one event. Copies of shared pages need free ones. A sequence that lacks
  /// them waits until there are as many; it is not scored again before.
  void event(std::vector<SequenceId> ids) {
    std::erase_if(ids, [&](SequenceId id) { return lacking_[id] > pool_.free_pages(); });
    if (ids.empty()) return;
    Ints lengths;
    for (const SequenceId id : ids) lengths.push_back(sequences_.length(id));
    const kvkeep::CacheView view{
        .sequences = ids, .lengths = {lengths}, .block_table = sequences_.table(ids), .pages = &pool_};
    const kvkeep::Plan plan = keeper_->plan(view);
    std::int32_t left = pool_.free_pages();
    bool enough = true;
    for (const kvkeep::PageMove& move : plan.pages) {
      const bool lacks = move.taken > left;
      lacking_[ids[static_cast<std::size_t>(move.sequence)]] = lacks ? std::max(move.taken, pool_.free_pages() + 1) : 0;
      if (!lacks) left -= move.taken;
      enough = enough && !lacks;
    }
    if (!enough) return event(ids);  // without those
    const kvkeep::Report report = keeper_->apply(plan, view);
    sequences_.settle(ids, report.pages);  // 7. takes over the new pages
    for (const kvkeep::PageMove& move : report.pages) numbers_.copies += move.taken;
    numbers_.freed += report.pages_freed;
    if (report.pages_freed > 0) crowded_ = false;
  }

  kvkeep::lm::Decoder& decoder_;
  kvkeep::PagePool pool_;
  kvkeep::PagedSequences sequences_;
  std::optional<kvkeep::Keeper> keeper_;
  std::vector<kvkeep::LayerKv> cache_;
  Workload work_;
  std::deque<Request*> waiting_;
  std::vector<Request*> running_;
  std::map<SequenceId, std::int32_t> lacking_;  ///< free pages that a sequence which is due waits for
  bool crowded_ = false;                        ///< a request was preempted, and no pages were freed since
  Numbers numbers_;
};

[[noreturn]] void refuse_option(const std::string& what) {
  std::cerr << "example_serving: " << what << "; see --help\n";
  std::exit(2);
}

Options parse(int argc, char** argv) {
  Options o;
  const auto number = [](const std::string& name, const std::string& value, double least) {
    char* end = nullptr;
    const double given = std::strtod(value.c_str(), &end);
    if (value.empty() || *end != '\0' || !(given >= least) || given > 1e9)
      refuse_option(name + ": given '" + value + "'; allowed a number of " + kvkeep::text(least) + " or more");
    return given;
  };
  const auto whole = [&](const std::string& name, const std::string& value, double least) {
    return static_cast<std::int32_t>(number(name, value, least));
  };
  const auto range = [&](const std::string& name, const std::string& value) {
    const std::size_t colon = value.find(':');
    if (colon == std::string::npos) refuse_option(name + ": given '" + value + "'; allowed A:B");
    const Range given{whole(name, value.substr(0, colon), 1), whole(name, value.substr(colon + 1), 1)};
    if (given.first > given.last) refuse_option(name + ": given '" + value + "'; allowed A:B with A at most B");
    return given;
  };
  const std::map<std::string, std::function<void(const std::string&, const std::string&)>> known{
      {"--model", [&](const auto&, const auto& v) { o.model = v; }},
      {"--weights",
       [&](const auto& name, const auto& v) {
         if (v != "f32" && v != "bf16") refuse_option(name + ": given '" + v + "'; allowed f32, bf16");
         o.weights = v;
       }},
      {"--policy", [&](const auto&, const auto& v) { o.policies.push_back(v); }},
      {"--haystack", [&](const auto&, const auto& v) { o.haystack = v; }},
      {"--csv", [&](const auto&, const auto& v) { o.csv = v; }},
      {"--steps", [&](const auto&, const auto& v) { o.steps = v; }},
      {"--requests", [&](const auto& name, const auto& v) { o.requests = whole(name, v, 1); }},
      {"--rate", [&](const auto& name, const auto& v) { o.rate = number(name, v, 1e-6); }},
      {"--pages",
       [&](const auto& name, const auto& v) {
         o.pages.clear();
         for (std::size_t at = 0; at <= v.size();) {
           const std::size_t end = std::min(v.find(',', at), v.size());
           o.pages.push_back(whole(name, v.substr(at, end - at), 1));
           at = end + 1;
         }
       }},
      {"--page-size", [&](const auto& name, const auto& v) { o.page_size = whole(name, v, 1); }},
      {"--prefixes", [&](const auto& name, const auto& v) { o.prefixes = whole(name, v, 0); }},
      {"--prefix", [&](const auto& name, const auto& v) { o.prefix = range(name, v); }},
      {"--prompt", [&](const auto& name, const auto& v) { o.prompt = range(name, v); }},
      {"--answer", [&](const auto& name, const auto& v) { o.answer = range(name, v); }},
      {"--rounds", [&](const auto& name, const auto& v) { o.rounds = whole(name, v, 1); }},
      {"--seed", [&](const auto& name, const auto& v) { o.seed = static_cast<std::uint32_t>(number(name, v, 0)); }}};
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--help" || name == "-h") {
      std::cout << kHelp;
      std::exit(0);
    }
    if (name == "--quiet") {
      o.quiet = true;
      continue;
    }
    const auto found = known.find(name);
    if (found == known.end()) refuse_option("unknown option; given '" + name + "'");
    if (i + 1 == argc) refuse_option(name + ": a value is missing");
    found->second(name, argv[++i]);
  }
  if (o.policies.empty()) o.policies = {"ams-tova,budget=96,interval=32,recent=16"};
  if (o.pages.empty()) o.pages = {160};
  if (!o.haystack.empty() && o.prompt.first < 64)
    refuse_option(kvkeep::text("--prompt: given ", o.prompt.first, ":", o.prompt.last,
                               "; allowed with --haystack 64 or more, to hide a number in prose"));
  return o;
}

/// One row: what served the requests, in how many pages, and what came of it.
struct Row {
  std::string name;
  std::int32_t pages = 0;
  Numbers numbers = {};  ///< of the first round; the others differ in time alone
  std::vector<double> seconds = {}, cpu_seconds = {}, to_engine = {};  ///< of each round
  double same = 1;                                                     ///< a share
  std::int32_t asked[2] = {0, 0}, answered[2] = {0, 0};                ///< at once, later
};

double median(std::vector<double> of) {
  std::sort(of.begin(), of.end());
  return (of[(of.size() - 1) / 2] + of[of.size() / 2]) / 2;
}
double lowest(const std::vector<double>& of) { return *std::min_element(of.begin(), of.end()); }
double highest(const std::vector<double>& of) { return *std::max_element(of.begin(), of.end()); }

std::string fixed(double value, int digits) {
  char cell[32];
  std::snprintf(cell, sizeof cell, "%.*f", digits, value);
  return cell;
}

/// The share of `answers` that stands at the same place in `others`; the questions between are not counted.
double same_share(const std::vector<Request>& answers, const std::vector<Request>& others) {
  std::int64_t same = 0, all = 0;
  for (std::size_t r = 0; r < answers.size(); ++r)
    for (std::size_t i = 0; i < answers[r].answer.size(); ++i) {
      const auto after = static_cast<std::int64_t>(i) - answers[r].new_tokens;
      if (after >= 0 && after < static_cast<std::int64_t>(answers[r].question.size())) continue;
      ++all;
      same += i < others[r].answer.size() && answers[r].answer[i] == others[r].answer[i] ? 1 : 0;
    }
  return all == 0 ? 1 : static_cast<double>(same) / static_cast<double>(all);
}

void print_table(const std::vector<Row>& rows, bool asks) {
  std::vector<std::vector<std::string>> cells{
      {"pages", "", "in flight", "most", "tokens/s", "to engine", "steps", "preempted", "again", "freed", "same"}};
  const bool rounds = rows.front().to_engine.size() > 1;
  if (rounds) cells.front().insert(cells.front().begin() + 6, "lowest, highest");
  if (asks) cells.front().insert(cells.front().end(), {"at once", "later"});
  for (const Row& row : rows) {
    const Numbers& n = row.numbers;
    const auto steps = static_cast<double>(std::max<std::int64_t>(1, n.steps));
    const auto tokens = static_cast<double>(n.tokens);
    cells.push_back({std::to_string(row.pages), row.name, fixed(static_cast<double>(n.request_steps) / steps, 1),
                     std::to_string(n.most_at_once), fixed(tokens / median(row.seconds), 1),
                     fixed(median(row.to_engine), 2), std::to_string(n.steps), std::to_string(n.preempted),
                     fixed(100 * static_cast<double>(n.again) / tokens, 0) + " %", std::to_string(n.freed),
                     fixed(100 * row.same, 1) + " %"});
    if (rounds)
      cells.back().insert(cells.back().begin() + 6,
                          fixed(lowest(row.to_engine), 2) + ", " + fixed(highest(row.to_engine), 2));
    for (int i = 0; asks && i < 2; ++i) cells.back().push_back(kvkeep::text(row.answered[i], " of ", row.asked[i]));
  }
  std::vector<int> widths(cells.front().size(), 0);
  for (const auto& line : cells)
    for (std::size_t c = 0; c < line.size(); ++c) widths[c] = std::max(widths[c], static_cast<int>(line[c].size()));
  for (std::size_t r = 0; r < cells.size(); ++r) {
    for (std::size_t c = 0; c < widths.size(); ++c)
      std::printf(c == 1 ? "| %-*s " : "| %*s ", widths[c], cells[r][c].c_str());
    std::printf("|\n");
    for (std::size_t c = 0; r == 0 && c < widths.size(); ++c)
      std::printf("|%s%s", std::string(static_cast<std::size_t>(widths[c]) + 1, '-').c_str(), c == 1 ? "-" : ":");
    if (r == 0) std::printf("|\n");
  }
}

/// Where a policy begins to pay as the pool shrinks. Less than a twentieth is no difference: runs vary by as much.
void print_break_even(const std::vector<Row>& rows, const std::vector<std::string>& policies) {
  for (const std::string& policy : policies) {
    std::vector<Row> its;
    for (const Row& row : rows)
      if (row.name == policy) its.push_back(row);
    std::sort(its.begin(), its.end(), [](const Row& a, const Row& b) { return a.pages > b.pages; });
    const auto pays =
        std::find_if(its.begin(), its.end(), [](const Row& row) { return median(row.to_engine) >= 1.05; });
    std::string where = "in none of these pools";
    if (pays == its.begin())
      where = kvkeep::text("in ", its.front().pages, " pages, the largest pool");
    else if (pays != its.end())
      where = kvkeep::text("between ", (pays - 1)->pages, " and ", pays->pages, " pages");
    std::printf("\n%s begins to pay (5 %% or more) %s.\n", policy.c_str(), where.c_str());
  }
}

std::ofstream opened(const std::string& file, const char* header) {
  std::ofstream out;
  if (file.empty()) return out;
  out.open(file);
  KVKEEP_REQUIRE(out.good(), file, " cannot be written; allowed a file in an existing folder");
  out << header << '\n';
  return out;
}

int run(const Options& o) {
  kvkeep::io::RunFiles files;
  files.reads("--model", o.model);
  files.reads("--haystack", o.haystack);
  for (const std::string& policy : o.policies) files.declare("--policy", kvkeep::files_of_policy(policy));
  files.writes("--csv", o.csv);
  files.writes("--steps", o.steps);
  files.writes_streams();
  kvkeep::lm::Decoder decoder = kvkeep::lm::Decoder::open(
      o.model,
      o.weights.empty() ? std::nullopt : std::optional(o.weights == "f32" ? kvkeep::Dtype::f32 : kvkeep::Dtype::bf16));
  std::optional<Prose> prose;
  if (!o.haystack.empty()) prose.emplace(o);
  const Workload work = workload_of(o, decoder.config().vocab, prose ? &*prose : nullptr);
  std::ofstream csv = opened(o.csv,
                             "pages,run,in_flight,most_in_flight,tokens,seconds,cpu_seconds,to_engine,"
                             "to_engine_lowest,to_engine_highest,preempted,"
                             "computed_again,pages_freed,pages_copied,mean_pages,most_pages,finished,aborted,steps,"
                             "same,asked_at_once,answered_at_once,asked_later,answered_later");
  std::ofstream steps = opened(o.steps, "policy,step,pages_used,pages,running,waiting");
  // The restricted run: what the first policy asks of the engine, with a budget that nothing reaches.
  const std::string never = "budget=1000000000";
  const std::regex budget("budget=[^,]*");
  const std::string& first = o.policies.front();
  std::vector<std::pair<std::string, std::string>> runs{
      {"engine", ""},
      {"restricted",
       std::regex_search(first, budget) ? std::regex_replace(first, budget, never) : first + "," + never}};
  for (const std::string& policy : o.policies) runs.emplace_back(policy, policy);

  std::vector<Row> rows;
  std::vector<Request> by_engine;
  for (const std::int32_t pages : o.pages) {
    std::vector<Row> of_pool;
    for (const auto& one : runs) of_pool.push_back({.name = one.first, .pages = pages});
    for (std::int32_t round = 1; round <= o.rounds; ++round) {
      double engines = 0;  // seconds of CPU time
      for (std::size_t r = 0; r < runs.size(); ++r) {
        Row& row = of_pool[r];
        Engine engine(decoder, pages, o.page_size, runs[r].second, work);
        std::string label = kvkeep::text(pages, " pages, ", row.name);
        if (o.rounds > 1) label += kvkeep::text(", round ", round, " of ", o.rounds);
        const Bar bar(std::move(label), o.requests, o.quiet);
        const Numbers n =
            engine.serve([&](std::int64_t step, std::int64_t used, std::int64_t running, std::int64_t waiting) {
              bar.at(engine.done());
              if (steps.is_open() && pages == o.pages.front() && round == 1)
                steps << '"' << row.name << "\"," << step << ',' << used << ',' << pages << ',' << running << ','
                      << waiting << '\n';
            });
        if (r == 0) engines = n.cpu_seconds;
        row.seconds.push_back(n.seconds);
        row.cpu_seconds.push_back(n.cpu_seconds);
        row.to_engine.push_back(engines / n.cpu_seconds);  // the tokens are the same
        if (round > 1) continue;
        row.numbers = n;
        if (by_engine.empty()) by_engine = engine.requests();
        row.same = same_share(engine.requests(), by_engine);
        for (const Request& request : engine.requests()) {
          if (!prose) break;
          const int later = request.question.empty() ? 0 : 1;
          ++row.asked[later];
          row.answered[later] += prose->answered(request) ? 1 : 0;
        }
      }
    }
    for (const Row& row : of_pool) {
      const Numbers& n = row.numbers;
      const auto all_steps = static_cast<double>(std::max<std::int64_t>(1, n.steps));
      if (csv.is_open())
        csv << kvkeep::text(pages, ",\"", row.name, "\",", static_cast<double>(n.request_steps) / all_steps, ",",
                            n.most_at_once, ",", n.tokens, ",", median(row.seconds), ",", median(row.cpu_seconds), ",",
                            median(row.to_engine), ",", lowest(row.to_engine), ",", highest(row.to_engine), ",",
                            n.preempted, ",", n.again, ",", n.freed, ",", n.copies, ",",
                            static_cast<double>(n.page_steps) / all_steps, ",", n.most_pages, ",", n.finished, ",",
                            n.aborted, ",", n.steps, ",", row.same, ",", row.asked[0], ",", row.answered[0], ",",
                            row.asked[1], ",", row.answered[1])
            << std::endl;  // a run that is stopped leaves the pools before
    }
    rows.insert(rows.end(), of_pool.begin(), of_pool.end());
  }
  print_table(rows, prose.has_value());
  print_break_even(rows, o.policies);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  kvkeep::use_torch();
  const kvkeep::UsingThreads threads(kvkeep::torch_threads());
  try {
    return run(options);
  } catch (const kvkeep::Error& error) {
    std::cerr << "example_serving: " << error.what() << "\n";
    return dynamic_cast<const kvkeep::InvalidArgument*>(&error) != nullptr ? 2 : 1;
  }
}
