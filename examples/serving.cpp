// Continuous batching over a fixed number of pages, with and without kvkeep: prefixes are shared, sequences grow, are
// cut, finish, are aborted or preempted. See --help.

#include <ATen/Parallel.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kvkeep/kvkeep.h"
#include "kvkeep/lm/generation.h"

namespace {

using kvkeep::SequenceId;
using Ints = std::vector<std::int32_t>;

constexpr const char* kHelp = R"(example_serving: what a policy buys an engine whose cache is a fixed number of pages.

Requests arrive at random (Poisson). Most begin with one of a few prompt prefixes, whose pages they share; each then
decodes its own number of tokens. A step runs every request that has arrived. When pages run out, the newest request is
preempted: its pages go back, and it returns to the head of the queue to be computed again.
The same requests are served twice, with policy full (nothing is ever dropped) and with --policy.

  example_serving                                    both runs with the shipped model, the table on stdout
  example_serving --csv serving.csv                  also the pages in use after every step; to draw them:
                                                     examples/plot_serving.py serving.csv serving.png
  example_serving --pages 96 --policy tova,budget=64,interval=16

  --model FOLDER      a model in the Hugging Face layout   [examples/model, beside this program's sources]
  --policy POLICY     as in `kvkeep policies`              [ams-tova,budget=96,interval=32,recent=16]
  --requests N        how many arrive                      [64]
  --rate X            arrivals per step, on average        [0.06]
  --pages N           pages in the pool                    [160]
  --page-size N       slots per page, a power of two       [16]
  --prefixes N        shared prompt prefixes               [3]
  --seed N            everything random follows from it    [1]
  --csv FILE          pages in use, requests running and waiting after each step of both runs
  --quiet             no progress bar (if stderr is not a terminal, there is none anyway)

Prompts are random tokens: this shows pages and pace, not answers. How to read the table: `most requests at once` is
how many requests had pages at the same time; preempted requests are computed twice; pages freed are those that events
gave back. Everything but tokens/s follows from the seed.
)";

struct Options {
  std::string model = KVKEEP_EXAMPLE_MODEL, policy = "ams-tova,budget=96,interval=32,recent=16", csv;
  std::int32_t requests = 64, pages = 160, page_size = 16, prefixes = 3;
  double rate = 0.06;
  std::uint32_t seed = 1;
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
  Ints answer;
};

struct Workload {
  std::vector<Ints> prefixes;
  std::vector<Request> requests;
};

/// The same on every machine, which std:: distributions are not.
class Random {
 public:
  explicit Random(std::uint32_t seed) : bits_(seed) {}
  double unit() { return (bits_() + 0.5) / 4294967296.0; }
  std::int32_t between(std::int32_t first, std::int32_t last) {
    return first + static_cast<std::int32_t>(unit() * (last - first + 1));
  }
  Ints ids(std::int32_t n, std::int32_t vocab) {
    Ints ids(static_cast<std::size_t>(n));
    for (std::int32_t& id : ids) id = between(0, vocab - 1);
    return ids;
  }

 private:
  std::mt19937 bits_;
};

Workload workload_of(const Options& o, std::int32_t vocab) {
  Random random(o.seed);
  Workload work;
  for (std::int32_t p = 0; p < o.prefixes; ++p) work.prefixes.push_back(random.ids(random.between(40, 72), vocab));
  double time = 0;
  for (std::int32_t r = 0; r < o.requests; ++r) {
    time -= std::log(random.unit()) / o.rate;
    Request request{.id = r,
                    .arrives = static_cast<std::int32_t>(time),
                    .prefix = random.unit() < 0.8 ? random.between(0, o.prefixes - 1) : -1,
                    .prompt = {},
                    .answer = {}};
    if (o.prefixes == 0) request.prefix = -1;
    if (request.prefix >= 0) request.prompt = work.prefixes[static_cast<std::size_t>(request.prefix)];
    const Ints own = random.ids(random.between(8, 40), vocab);
    request.prompt.insert(request.prompt.end(), own.begin(), own.end());
    request.new_tokens = random.between(160, 640);
    if (random.unit() < 0.08) request.aborted_after = random.between(1, request.new_tokens);
    work.requests.push_back(std::move(request));
  }
  return work;
}

/// One line of the table.
struct Numbers {
  std::int64_t finished = 0, aborted = 0, tokens = 0, most_at_once = 0, preempted = 0, freed = 0, copies = 0, steps = 0,
               most_pages = 0, page_steps = 0, request_steps = 0;
  double seconds = 0;
};

/// A bar on a terminal, nothing elsewhere.
class Bar {
 public:
  Bar(std::string label, std::int64_t total, bool quiet)
      : label_(std::move(label)), total_(total), shown_(!quiet && total > 0 && ::isatty(STDERR_FILENO) == 1) {}
  ~Bar() {
    if (shown_) std::fputs("\r\033[K", stderr);
  }
  void at(std::int64_t done) const {
    if (!shown_) return;
    const auto full = static_cast<std::size_t>(30 * done / total_);
    std::fprintf(stderr, "\r[%s%s] %3d %%  %s", std::string(full, '#').c_str(), std::string(30 - full, '.').c_str(),
                 static_cast<int>(100 * done / total_), label_.c_str());
  }

 private:
  std::string label_;
  std::int64_t total_;
  bool shown_;
};

/// The engine: queue, pages, steps. The kvkeep part: `keeper_`, `sequences_`, and the lines marked with a number.
class Engine {
 public:
  Engine(kvkeep::lm::Decoder& decoder, const Options& o, const std::string& policy, Workload work)
      : decoder_(decoder),
        pool_(o.pages, o.page_size),
        sequences_(pool_),
        keeper_(decoder.spec(), kvkeep::make_policy(policy), {.output_projections = decoder.output_projections()}),
        cache_(decoder.make_pages(o.pages, o.page_size)),
        work_(std::move(work)) {
    for (std::size_t p = 0; p < work_.prefixes.size(); ++p) hold_prefix(static_cast<std::int32_t>(p));
  }

  /// Called after each step: step, pages in use, requests running, requests waiting.
  using Watch = std::function<void(std::int64_t, std::int64_t, std::int64_t, std::int64_t)>;

  Numbers serve(const Watch& watch) {
    const auto start = std::chrono::steady_clock::now();
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
    return numbers_;
  }

  [[nodiscard]] std::int64_t done() const { return numbers_.finished + numbers_.aborted; }

 private:
  static SequenceId prefix_id(std::int32_t prefix) { return -1 - prefix; }

  /// A prefix stays resident: its pages are never cut, only shared.
  void hold_prefix(std::int32_t prefix) {
    const Ints& ids = work_.prefixes[static_cast<std::size_t>(prefix)];
    const auto n = static_cast<std::int32_t>(ids.size());
    KVKEEP_REQUIRE(sequences_.admit(prefix_id(prefix), n).given(), "serving: the prefixes do not fit into ",
                   pool_.capacity(), " pages; allowed a larger --pages");
    const SequenceId id = prefix_id(prefix);
    Ints indptr{0, n}, positions(ids.size()), row{0}, none{0};
    std::iota(positions.begin(), positions.end(), 0);
    decoder_.forward({ids, indptr, positions, row, none}, cache_, sequences_.table({&id, 1}),
                     {.logits = kvkeep::lm::Logits::none});
  }

  /// Tokens of a request that must be in the cache before it continues to decode: its prompt, and after a preemption
  /// its answer so far.
  static Ints tokens_to_compute(const Request& request) {
    Ints tokens = request.prompt;
    tokens.insert(tokens.end(), request.answer.begin(), request.answer.end());
    return tokens;
  }

  /// First come, first served, while there are pages for the next one. After a preemption no request comes in until
  /// pages are freed: the one that was just preempted would only be preempted again.
  void admit() {
    std::int32_t promised = 0;  // pages of the requests that come in now
    while (!waiting_.empty() && (!crowded_ || running_.empty())) {
      Request& request = *waiting_.front();
      const auto all = static_cast<std::int32_t>(tokens_to_compute(request).size());
      const std::int32_t shared =
          request.prefix < 0
              ? 0
              : static_cast<std::int32_t>(work_.prefixes[static_cast<std::size_t>(request.prefix)].size());
      // Each running request leaves one page free beyond its need, since it will grow.
      const std::int32_t wanted = (all - shared) / pool_.page_size() + 2;
      if (promised + wanted + static_cast<std::int32_t>(running_.size()) > pool_.free_pages() && !running_.empty())
        return;
      promised += wanted;
      if (request.prefix >= 0)
        sequences_.fork(request.id, prefix_id(request.prefix), shared);  // 1. the prefix's pages, shared
      else
        static_cast<void>(sequences_.admit(request.id, 0));
      keeper_.join(request.id, shared, static_cast<std::int32_t>(request.prompt.size()));  // 2. kvkeep is told
      running_.push_back(&request);
      waiting_.pop_front();
    }
  }

  void leave(Request& request) {
    keeper_.leave(request.id);
    sequences_.release(request.id);
    std::erase(running_, &request);
  }

  /// The newest request goes back to the head of the queue, and its pages to the pool.
  void preempt() {
    Request& newest = **std::max_element(running_.begin(), running_.end(),
                                         [](const Request* a, const Request* b) { return a->id < b->id; });
    KVKEEP_REQUIRE_AS(kvkeep::StateError, running_.size() > 1, "serving: request ", newest.id,
                      " alone does not fit into ", pool_.capacity(), " pages; allowed a larger --pages");
    leave(newest);
    waiting_.push_front(&newest);
    crowded_ = true;
    ++numbers_.preempted;
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
      const kvkeep::PageGrant grant = sequences_.append(request.id, new_tokens_of(request));
      if (grant.given()) {
        has_room[request.id] = true;
        copies.insert(copies.end(), grant.copies.begin(), grant.copies.end());
        ++i;
      } else {
        preempt();
        i = 0;
      }
    }
    kvkeep::copy_pages(cache_, copies);
    numbers_.copies += static_cast<std::int64_t>(copies.size());
  }

  [[nodiscard]] std::int32_t new_tokens_of(const Request& request) const {
    return static_cast<std::int32_t>(static_cast<std::int64_t>(request.prompt.size() + request.answer.size()) -
                                     keeper_.logical_length(request.id));
  }

  void step() {
    make_room();
    std::vector<SequenceId> ids;
    Ints tokens, indptr{0}, positions, rows(running_.size()), lengths;
    std::iota(rows.begin(), rows.end(), 0);
    for (const Request* request : running_) {
      const Ints all = tokens_to_compute(*request);
      for (auto p = keeper_.logical_length(request->id); p < static_cast<std::int64_t>(all.size()); ++p) {
        tokens.push_back(all[static_cast<std::size_t>(p)]);
        positions.push_back(static_cast<std::int32_t>(p));
      }
      ids.push_back(request->id);
      lengths.push_back(sequences_.length(request->id) -
                        (static_cast<std::int32_t>(tokens.size()) - indptr.back()));  // slots in use before the step
      indptr.push_back(static_cast<std::int32_t>(tokens.size()));
    }
    const at::Tensor table = sequences_.table(ids);  // 4. one table for attention and for the event
    kvkeep::lm::StepOptions options;
    options.on_layer = [&](const kvkeep::lm::LayerSight& sight) {
      keeper_.observe({.layer = sight.layer,
                       .sequences = ids,
                       .indptr = indptr,
                       .queries = sight.queries,
                       .positions = positions});  // 5. in every layer
    };
    const Ints predicted =
        kvkeep::lm::argmax(decoder_.forward({tokens, indptr, positions, rows, lengths}, cache_, table, options));

    for (std::size_t i = 0; i < ids.size(); ++i) lengths[i] = sequences_.length(ids[i]);
    const kvkeep::CacheView view{
        .layers = cache_, .sequences = ids, .lengths = {lengths}, .block_table = table, .pages = &pool_};
    const kvkeep::Report report = event(view);
    sequences_.settle(view, report.pages);  // 7. takes over the new pages
    numbers_.freed += report.pages_freed;
    if (report.pages_freed > 0) crowded_ = false;

    const std::vector<Request*> ran = running_;
    for (std::size_t i = 0; i < ran.size(); ++i) {
      Request& request = *ran[i];
      request.answer.push_back(predicted[i]);
      ++numbers_.tokens;
      const auto said = static_cast<std::int32_t>(request.answer.size());
      const bool finished = said >= request.new_tokens,
                 gone = request.aborted_after > 0 && said >= request.aborted_after;
      if (!finished && !gone) continue;
      ++(finished ? numbers_.finished : numbers_.aborted);
      leave(request);
      crowded_ = false;
    }
  }

  /// 6. Cuts all sequences that are due, in one event. It may need a page for a copy of a shared one: if there is none,
  /// it changes nothing and comes after the next step.
  kvkeep::Report event(const kvkeep::CacheView& view) {
    const kvkeep::Plan plan = keeper_.plan(view);
    std::int64_t wanted = 0;
    for (const kvkeep::PageMove& move : plan.pages) wanted += move.taken;
    if (wanted > pool_.free_pages()) return {};
    numbers_.copies += wanted;
    return keeper_.apply(plan, view);
  }

  kvkeep::lm::Decoder& decoder_;
  kvkeep::PagePool pool_;
  kvkeep::PagedSequences sequences_;
  kvkeep::Keeper keeper_;
  std::vector<kvkeep::LayerKv> cache_;
  Workload work_;
  std::deque<Request*> waiting_;
  std::vector<Request*> running_;
  bool crowded_ = false;  ///< a request was preempted, and no pages were freed since
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
    const std::map<std::string, std::function<void(const std::string&)>> known{
        {"--model", [&](const std::string& v) { o.model = v; }},
        {"--policy", [&](const std::string& v) { o.policy = v; }},
        {"--csv", [&](const std::string& v) { o.csv = v; }},
        {"--requests", [&](const std::string& v) { o.requests = static_cast<std::int32_t>(number(name, v, 1)); }},
        {"--rate", [&](const std::string& v) { o.rate = number(name, v, 1e-6); }},
        {"--pages", [&](const std::string& v) { o.pages = static_cast<std::int32_t>(number(name, v, 1)); }},
        {"--page-size", [&](const std::string& v) { o.page_size = static_cast<std::int32_t>(number(name, v, 1)); }},
        {"--prefixes", [&](const std::string& v) { o.prefixes = static_cast<std::int32_t>(number(name, v, 0)); }},
        {"--seed", [&](const std::string& v) { o.seed = static_cast<std::uint32_t>(number(name, v, 0)); }}};
    const auto found = known.find(name);
    if (found == known.end()) refuse_option("unknown option; given '" + name + "'");
    if (i + 1 == argc) refuse_option(name + ": a value is missing");
    found->second(argv[++i]);
  }
  return o;
}

/// sum / n with one digit after the point.
std::string tenths(std::int64_t sum, std::int64_t n) {
  const std::int64_t rounded = (10 * sum + n / 2) / std::max<std::int64_t>(1, n);
  return kvkeep::text(rounded / 10, ".", rounded % 10);
}

void print_table(const std::vector<std::pair<std::string, Numbers>>& runs, std::int32_t pages) {
  const std::vector<std::pair<const char*, std::function<std::string(const Numbers&)>>> lines{
      {"requests finished", [](const Numbers& n) { return std::to_string(n.finished); }},
      {"requests aborted by their users", [](const Numbers& n) { return std::to_string(n.aborted); }},
      {"steps until all were served", [](const Numbers& n) { return std::to_string(n.steps); }},
      {"tokens/s",
       [](const Numbers& n) {
         return std::to_string(static_cast<std::int64_t>(static_cast<double>(n.tokens) / n.seconds));
       }},
      {"most requests at once", [](const Numbers& n) { return std::to_string(n.most_at_once); }},
      {"mean requests at once", [](const Numbers& n) { return tenths(n.request_steps, n.steps); }},
      {"most pages in use",
       [pages](const Numbers& n) { return std::to_string(n.most_pages) + " of " + std::to_string(pages); }},
      {"mean pages in use", [](const Numbers& n) { return tenths(n.page_steps, n.steps); }},
      {"preempted", [](const Numbers& n) { return std::to_string(n.preempted); }},
      {"pages freed by events", [](const Numbers& n) { return std::to_string(n.freed); }},
      {"shared pages copied", [](const Numbers& n) { return std::to_string(n.copies); }}};
  std::size_t widths[2] = {0, 0};
  for (std::size_t r = 0; r < runs.size(); ++r) widths[r] = std::max<std::size_t>(runs[r].first.size(), 10);
  std::printf("| %-31s |", "");
  for (std::size_t r = 0; r < runs.size(); ++r)
    std::printf(" %*s |", static_cast<int>(widths[r]), runs[r].first.c_str());
  std::printf("\n|%s|", std::string(33, '-').c_str());
  for (std::size_t r = 0; r < runs.size(); ++r) std::printf("%s:|", std::string(widths[r] + 1, '-').c_str());
  std::printf("\n");
  for (const auto& [name, cell] : lines) {
    std::printf("| %-31s |", name);
    for (std::size_t r = 0; r < runs.size(); ++r)
      std::printf(" %*s |", static_cast<int>(widths[r]), cell(runs[r].second).c_str());
    std::printf("\n");
  }
}

int run(const Options& o) {
  kvkeep::lm::Decoder decoder = kvkeep::lm::Decoder::open(o.model);
  const Workload work = workload_of(o, decoder.config().vocab);
  std::ofstream csv;
  if (!o.csv.empty()) {
    csv.open(o.csv);
    KVKEEP_REQUIRE(csv.good(), "serving: ", o.csv, " cannot be written; allowed a file in an existing folder");
    csv << "policy,step,pages_used,pages,running,waiting\n";
  }
  std::vector<std::pair<std::string, Numbers>> runs;
  for (const std::string& policy : {std::string("full"), o.policy}) {
    const std::string name = policy.substr(0, policy.find(','));
    Engine engine(decoder, o, policy, work);
    const Bar bar("policy " + name, o.requests, o.quiet);
    const Numbers numbers =
        engine.serve([&](std::int64_t step, std::int64_t used, std::int64_t running, std::int64_t waiting) {
          bar.at(engine.done());
          if (csv.is_open())
            csv << name << ',' << step << ',' << used << ',' << o.pages << ',' << running << ',' << waiting << '\n';
        });
    runs.emplace_back(name, numbers);
  }
  print_table(runs, o.pages);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  try {
    return run(options);
  } catch (const kvkeep::Error& error) {
    std::cerr << "example_serving: " << error.what() << "\n";
    return 1;
  }
}
