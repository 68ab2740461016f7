// SPDX-License-Identifier: Apache-2.0
// kvkeep chat: a conversation under a policy. The cache lives on from turn to turn, so each token runs once.

#include <unistd.h>

#include <CLI/Option.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <iostream>
#include <optional>

#include "commands.h"
#include "kvkeep/cli/options.h"
#include "kvkeep/cli/program.h"
#include "kvkeep/core/error.h"
#include "kvkeep/core/limits.h"
#include "kvkeep/io/run_files.h"
#include "kvlab/generation.h"
#include "model_options.h"

namespace kvkeep::cli {
namespace {

constexpr const char* kChatExamples = R"(
Examples:
  kvkeep chat --model SmolLM2.gguf --policy ams-tova,budget=512,interval=64
  kvkeep chat --model SmolLM2.gguf --system "Answer in one sentence." --temperature 0.7
  printf 'My name is Ada.\nWhat is my name?\n' | kvkeep chat --model SmolLM2.gguf --policy tova,budget=256

A line is a turn; the end of the input (Ctrl-D) ends the conversation. Ctrl-C ends an answer, and what was written of it
stays in the conversation; where no answer is being written it ends the program. After each answer a line on stderr
says what the cache holds: tokens seen, slots of a row (layer, KV head) on average, events, bytes beside those of a
cache that drops nothing.
)";

constexpr std::int32_t kLongestByDefault = 8192;

struct ChatOptions {
  ModelOptions model;
  SamplingOptions sampling;
  std::string policy = "full", system;
  std::int32_t new_tokens = 512, context = 0;
  bool quiet = false;
};

volatile std::sig_atomic_t interrupted = 0;
extern "C" void end_answer(int) { interrupted = 1; }

// While one lives, Ctrl-C sets `interrupted` instead of ending the program.
class AnswerSignal {
 public:
  AnswerSignal() {
    interrupted = 0;
    struct sigaction ours = {};
    ours.sa_handler = end_answer;
    ours.sa_flags = SA_RESTART;
    ::sigaction(SIGINT, &ours, &before_);
  }
  ~AnswerSignal() { ::sigaction(SIGINT, &before_, nullptr); }
  AnswerSignal(const AnswerSignal&) = delete;
  AnswerSignal& operator=(const AnswerSignal&) = delete;

 private:
  struct sigaction before_ = {};
};

class Conversation {
 public:
  explicit Conversation(const ChatOptions& o)
      : options_(o),
        text_(lm::TextModel::open(o.model.folder)),
        decoder_(o.model.open()),
        capacity_(o.context > 0 ? o.context
                                : static_cast<std::int32_t>(
                                      std::min<std::int64_t>(decoder_.config().max_positions, kLongestByDefault))),
        stream_(text_.tokenizer),
        generator_(decoder_, policy(), generator_options()) {
    static_cast<void>(text_.layout());  // a model without a template is refused before anybody types
    if (!o.system.empty()) messages_.push_back({"system", o.system});
  }

  // Writes the answer as it comes. Throws InvalidArgument, and the conversation is as it was, for a message that the
  // cache has no room for.
  void answer(const std::string& said) {
    messages_.push_back({"user", said});
    try {
      feed();
    } catch (...) {
      messages_.pop_back();
      throw;
    }
    const AnswerSignal signal;
    std::string written;
    written_ = &written;
    const auto start = std::chrono::steady_clock::now();
    std::int64_t predicted = 0;
    std::chrono::steady_clock::time_point first = start;
    for (; interrupted == 0 && !generator_.done(*id_) && generator_.step(); ++predicted)
      if (predicted == 0) first = std::chrono::steady_clock::now();
    show(stream_.finish());
    print("\n");
    messages_.push_back({"assistant", written});
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - first;
    if (!options_.quiet) tell(predicted > 1 ? static_cast<double>(predicted - 1) / seconds.count() : 0);
  }

 private:
  std::unique_ptr<KVPolicy> policy() const {
    std::unique_ptr<KVPolicy> made = PolicyText(options_.policy).make();
    const std::string warning = warning_about(*made);
    if (!options_.quiet && !warning.empty()) note(warning);
    return made;
  }

  lm::GeneratorOptions generator_options() {
    lm::GeneratorOptions options{.capacity = capacity_,
                                 .cache_dtype = options_.model.dtype(),
                                 .accelerator = options_.model.device.accelerator()};
    options.hooks.on_token = [this](SequenceId, std::int32_t token) {
      last_ = token;
      ended_ = decoder_.config().ends(token);
      if (!ended_) show(stream_.push(token));
    };
    return options;
  }

  // What is new of the conversation runs in the next step.
  void feed() {
    std::vector<std::int32_t> tokens = id_ ? text_.turn(messages_) : text_.chat(messages_);
    if (id_ && !ended_) tokens.insert(tokens.begin(), last_);  // the last token of an answer was not fed
    const std::int64_t room = id_ ? generator_.slots_left(*id_) : capacity_;
    KVKEEP_REQUIRE(std::ssize(tokens) <= room, "chat: the message takes ", tokens.size(),
                   " tokens, and the cache has room for ", room,
                   "; allowed less, a larger --context, or a policy that cuts more");
    if (id_) return generator_.go_on(*id_, std::move(tokens), options_.new_tokens);
    const auto most = static_cast<std::int32_t>(room - std::ssize(tokens) + 1);
    id_ = generator_.join({.prompt = std::move(tokens),
                           .new_tokens = std::min(options_.new_tokens, most),
                           .stop_at_end = true,
                           .sampling = options_.sampling.sampling});
  }

  void show(const std::string& more) {
    print(more);
    *written_ += more;
  }

  // One line about the cache; on a terminal a pale one.
  void tell(double pace) {
    const Keeper& keeper = generator_.keeper();
    const ModelSpec& spec = keeper.spec();
    const std::vector<std::int32_t> layers = spec.full_layers();
    const std::int64_t rows = std::ssize(layers) * spec.kv_heads, tokens = keeper.logical_length(*id_);
    std::int64_t slots = 0;
    for (const std::int32_t layer : layers)
      for (std::int32_t head = 0; head < spec.kv_heads; ++head) slots += keeper.physical_length(*id_, layer, head);
    const std::int64_t events = keeper.totals().events,
                       full = tokens * rows * lm::bytes_of_slot(spec, options_.model.dtype());
    const bool cut_off = !ended_ && interrupted == 0;
    const bool pale = io::shows_colour(STDERR_FILENO);
    note(text(tokens, " tokens, ", real_cell(static_cast<double>(slots) / static_cast<double>(rows), 0).shown,
              " slots a row after ", events, events == 1 ? " event, " : " events, ",
              bytes_cell(generator_.bytes_held(*id_)).shown, " of ", bytes_cell(full).shown,
              pace > 0 ? text(", ", real_cell(pace, 1).shown, " tokens/s") : "",
              interrupted != 0                             ? "; the answer was interrupted"
              : cut_off && generator_.slots_left(*id_) < 1 ? "; the cache is full (--context)"
              : cut_off                                    ? "; the answer was cut off (--max-new-tokens)"
                                                           : ""),
         pale);
  }

  const ChatOptions& options_;
  lm::TextModel text_;
  lm::Decoder decoder_;
  std::int32_t capacity_;
  lm::StreamDecoder stream_;
  lm::Generator generator_;
  std::vector<lm::ChatMessage> messages_;
  std::optional<SequenceId> id_;
  std::int32_t last_ = 0;
  bool ended_ = false;
  std::string* written_ = nullptr;
};

void run(const ChatOptions& o) {
  lm::check_sampling(o.sampling.sampling);
  Conversation conversation(o);
  const bool terminal = ::isatty(STDIN_FILENO) == 1;
  for (std::string line;;) {
    if (terminal) print("> ");
    if (!std::getline(std::cin, line)) break;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      conversation.answer(line);
    } catch (const InvalidArgument& error) {
      if (!terminal) throw;
      note(error.what());
    }
  }
  if (terminal) print("\n");
}

}  // namespace

Run add_chat(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("chat", "a conversation under a policy; what the cache holds after each answer");
  auto o = std::make_shared<ChatOptions>();
  o->model.add(*sub);
  o->model.device.add(*sub);
  as_policy(sub->add_option("--policy", o->policy, kPolicyHelp))->option_text("POLICY [full]");
  sub->add_option("--system", o->system, "the system message")->option_text("TEXT [the template's own]");
  o->sampling.add(*sub);
  sub->add_option("--max-new-tokens", o->new_tokens, "longest answer")
      ->check(CLI::Range(1, 1 << 24))
      ->option_text("N [512]");
  sub->add_option("--context", o->context, "slots of a row: the longest conversation, unless the policy cuts")
      ->check(CLI::Range(1, 1 << 24))
      ->option_text("N [the model's positions, 8192 at most]");
  sub->add_flag("-q,--quiet", o->quiet, "say nothing about the cache");
  sub->footer(kChatExamples);
  return [o] { run(*o); };
}

}  // namespace kvkeep::cli
