// SPDX-License-Identifier: Apache-2.0
// An engine's day: requests that share prompts, several samples of one, drafts, preemption, and a page of metrics. See
// --help, and docs/reference/engines.md.

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine.h"
#include "kvkeep/io/run_files.h"
#include "kvkeep/keeper/metrics.h"
#include "kvkeep/keeper/thread_pool.h"
#ifdef KVKEEP_HAS_HTTPLIB
#include <httplib.h>
#endif

namespace {

using namespace serving;

std::atomic<int> interrupted = 0;  // by this signal

/// What the scheduler says for /metrics; the keeper's totals come with it.
class Metrics {
 public:
  void set(const Engine& engine) {
    const std::scoped_lock lock(mutex_);
    numbers_ = engine.numbers();
    keeper_ = {engine.totals(), R"(worker="0")"};
    gauges_ = {engine.running(), engine.waiting(), engine.available_pages()};
  }
  [[nodiscard]] std::string page() const {
    const std::scoped_lock lock(mutex_);
    std::string page = kvkeep::prometheus_metrics({&keeper_, 1});
    const auto add = [&page](const char* name, const char* type, const char* help, std::int64_t x) {
      page += kvkeep::text("# HELP ", name, " ", help, "\n# TYPE ", name, " ", type, "\n", name, " ", x, "\n");
    };
    add("serving_running_requests", "gauge", "Sequences that have pages.", gauges_[0]);
    add("serving_waiting_requests", "gauge", "Requests that wait for pages.", gauges_[1]);
    add("serving_available_pages", "gauge", "Pages that are free, or held by the prefix cache alone.", gauges_[2]);
    add("serving_tokens_total", "counter", "Tokens run.", numbers_.tokens);
    add("serving_cached_tokens_total", "counter", "Tokens of prompts that the prefix cache had.",
        numbers_.cached_tokens);
    add("serving_preempted_total", "counter", "Sequences that left for a while.", numbers_.preempted);
    add("serving_finished_total", "counter", "Answers written.", numbers_.finished);
    return page;
  }

 private:
  mutable std::mutex mutex_;
  Engine::Numbers numbers_;
  kvkeep::KeeperMetrics keeper_;
  std::array<std::int64_t, 3> gauges_{};
};

struct Options {
  Settings settings{.policy = "ams-tova,budget=48,interval=16,recent=8,window=4", .pages = 96, .page_size = 8};
  Limits limits;
  int requests = 200, threads = 1, metrics = 0;
  bool endless = false;  // requests come until a signal does
  std::uint32_t seed = 1;
};

/// A request with one of a few long prompts that all users share, and a short one of its own.
Request request_of(std::mt19937& bits, SequenceId id) {
  const auto between = [&bits](std::uint32_t least, std::uint32_t most) {
    return static_cast<std::int32_t>(least + bits() % (most - least + 1));
  };
  std::mt19937 shared(bits() % 5);
  Request request{.id = id,
                  .new_tokens = between(20, 120),
                  .samples = bits() % 5 == 0 ? between(2, 4) : 1,
                  .drafts = bits() % 4 == 0 ? 2 : 0};
  for (int t = 0; t < 96; ++t) request.prompt.push_back(static_cast<Token>(shared() % Model::kVocabulary));
  for (int t = between(4, 40); t > 0; --t) request.prompt.push_back(static_cast<Token>(bits() % Model::kVocabulary));
  return request;
}

#ifdef KVKEEP_HAS_HTTPLIB
/// http://127.0.0.1:PORT/metrics as long as it lives.
class MetricsServer {
 public:
  MetricsServer(const Metrics& metrics, int port) {
    server_.Get("/metrics", [&metrics](const httplib::Request&, httplib::Response& response) {
      response.set_content(metrics.page(), "text/plain; version=0.0.4; charset=utf-8");
    });
    server_.set_socket_options([](socket_t socket) {  // cpp-httplib's own let two programs share a port
      const int yes = 1;
      ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    });
    KVKEEP_REQUIRE(server_.bind_to_port("127.0.0.1", port), "--metrics: port ", port,
                   " cannot be listened on; allowed a free one");
    listening_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::yield();  // stop() would not reach it before
  }
  ~MetricsServer() { server_.stop(), listening_.join(); }
  MetricsServer(const MetricsServer&) = delete;

 private:
  httplib::Server server_;
  std::thread listening_;
};
#endif

int serve(const Options& o) {
  Metrics metrics;
#ifdef KVKEEP_HAS_HTTPLIB
  std::optional<MetricsServer> server;
  if (o.metrics > 0) {
    server.emplace(metrics, o.metrics);
    std::fprintf(stderr, "metrics: http://127.0.0.1:%d/metrics%s\n", o.metrics,
                 o.endless ? "; requests come until Ctrl-C" : "");
  }
#else
  KVKEEP_REQUIRE_AS(kvkeep::Unsupported, o.metrics == 0,
                    "--metrics: built without cpp-httplib (libcpp-httplib-dev); allowed without --metrics");
#endif
  kvkeep::ThreadPool pool(o.threads);
  Settings settings = o.settings;
  settings.threads = pool.threads();
  Engine engine(settings, o.limits);
  std::mt19937 bits(o.seed);
  const auto start = std::chrono::steady_clock::now();
  const bool bar = kvkeep::io::moves_cursor(STDERR_FILENO) && o.metrics == 0;
  SequenceId next = 0;
  std::int64_t answers = 0;
  for (int submitted = 0; interrupted == 0;) {
    if ((submitted < o.requests || o.endless) && engine.waiting() < 8) {
      engine.submit(request_of(bits, next));
      next += 8, ++submitted;
    }
    const bool more = engine.step();
    answers += std::ssize(engine.take_answers());
    metrics.set(engine);
    if (bar && engine.numbers().steps % 64 == 0)
      std::fprintf(stderr, "\r%3d %% of the requests, %lld running ", 100 * submitted / std::max(o.requests, 1),
                   static_cast<long long>(engine.running()));
    if (!more && submitted >= o.requests && !o.endless) break;
    if (o.metrics > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (bar) std::fputs("\r\033[K", stderr);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const Engine::Numbers& n = engine.numbers();
  const kvkeep::Totals& t = engine.totals();
  const auto row = [](const char* what, double x, const char* unit = "") {
    std::printf("| %-26s | %10.10g%s |\n", what, x, unit);
  };
  std::printf("| %-26s | %10s |\n|----------------------------|-----------:|\n", "", "");
  row("answers", static_cast<double>(answers));
  row("steps", static_cast<double>(n.steps));
  row("steps in flight, most", static_cast<double>(n.most_in_flight));
  row("sequences at once, most", static_cast<double>(n.most_running));
  row("tokens run", static_cast<double>(n.tokens));
  row("tokens found in the cache", static_cast<double>(n.cached_tokens));
  row("drafts that stood", static_cast<double>(n.accepted_drafts));
  row("preempted", static_cast<double>(n.preempted));
  row("events", static_cast<double>(t.events));
  row("sequences cut", static_cast<double>(t.sequences_cut));
  row("pages given back by events", static_cast<double>(t.pages_freed));
  std::printf("| %-26s | %10.2f |\n", "seconds", seconds);
  return interrupted == 0 ? 0 : 128 + interrupted;
}

int main_of(int argc, char** argv) {
  Options o;
  CLI::App app(
      "example_engine: serves random requests over a fixed number of pages, with a toy model: prompts that share\n"
      "beginnings (a prefix cache by hash, or a radix tree), in chunks; several samples of a prompt (forks); drafts\n"
      "(rollback); preemption to memory (save and restore); a step that is planned while the one before it runs.\n"
      "docs/reference/engines.md explains each place.");
  app.add_option("--policy", o.settings.policy, "as in `kvkeep policies`")->capture_default_str();
  app.add_option("--cache", o.settings.cache, "prefix cache: hash, radix, none")
      ->check(CLI::IsMember({"hash", "radix", "none"}))
      ->capture_default_str();
  app.add_option("--in-flight", o.limits.in_flight, "steps in flight")->check(CLI::Range(1, 2))->capture_default_str();
  app.add_option("--pages", o.settings.pages, "pages of the pool")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--requests", o.requests, "how many come")->check(CLI::Range(1, 1 << 20))->capture_default_str();
  app.add_option("--threads", o.threads, "of the keeper's loops")->check(CLI::Range(1, 256))->capture_default_str();
  app.add_option("--seed", o.seed, "the requests follow from it")->capture_default_str();
  app.add_option("--metrics", o.metrics,
                 "port: serves http://127.0.0.1:PORT/metrics for Prometheus; without --requests, requests then come "
                 "until Ctrl-C")
      ->check(CLI::Range(1, 65535));
  app.footer(
      "\nExamples:\n"
      "  example_engine                                     the table on stdout\n"
      "  example_engine --cache none                        how much more is run without a cache\n"
      "  example_engine --pages 40                          a pool that is too small: preemption\n"
      "  example_engine --policy full --pages 400           without eviction\n"
      "  example_engine --metrics 9400                      then open http://127.0.0.1:9400/metrics\n"
      "\nIts times are a toy's. What a GPU would serve: kvkeep plan --gpu h100 (docs/inside/performance.md).");
  try {
    app.parse(argc, argv);
    o.endless = o.metrics > 0 && app.count("--requests") == 0;
    for (const int each : {SIGINT, SIGTERM}) std::signal(each, [](int signal) { interrupted = signal; });
    return serve(o);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const kvkeep::Error& error) {
    std::fprintf(stderr, "example_engine: %s\n", error.what());
    return dynamic_cast<const kvkeep::InvalidArgument*>(&error) != nullptr ? 2 : 1;
  }
}

}  // namespace

int main(int argc, char** argv) { return main_of(argc, argv); }
