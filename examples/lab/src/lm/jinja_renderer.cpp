// SPDX-License-Identifier: Apache-2.0
#include "jinja_renderer.h"

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <span>

#include "jinja_builtins.h"

namespace kvkeep::lm::jinja {

struct Scope {
  const Scope* around = nullptr;
  std::map<std::string, Value, std::less<>> names = {};
  std::deque<Macro> macros = {};

  [[nodiscard]] const Value* find(std::string_view name) const {
    for (const Scope* scope = this; scope != nullptr; scope = scope->around)
      if (const auto at = scope->names.find(name); at != scope->names.end()) return &at->second;
    return nullptr;
  }
};

struct Macro {
  const Node* node;
  const Scope* around;  // where it is defined, which outlives every name of it
};

// A loop takes an item only when it is needed: its condition may depend on what the body did before.
struct Loop {
  std::vector<Value> items;
  std::function<bool(const Value&)> passes;
  std::size_t taken = 0;
  std::deque<Value> ahead = {};
  std::int64_t index = -1;
  Value previous = {}, current = {};

  bool look_ahead() {
    while (taken < items.size()) {
      const Value& item = items[taken++];
      if (!passes(item)) continue;
      ahead.push_back(item);
      return true;
    }
    return false;
  }

  bool advance() {
    if (ahead.empty() && !look_ahead()) return false;
    previous = std::exchange(current, ahead.front());
    ahead.pop_front();
    ++index;
    return true;
  }

  bool is_last() { return ahead.empty() && !look_ahead(); }

  std::int64_t length() {
    while (look_ahead()) {
    }
    return index + 1 + std::ssize(ahead);
  }

  Value attribute(std::string_view name, const Work& work) {
    if (name == "index0") return Value::of(index);
    if (name == "index") return Value::of(index + 1);
    if (name == "first") return Value::of(index == 0);
    if (name == "last") return Value::of(is_last());
    if (name == "length") return Value::of(length());
    if (name == "revindex") return Value::of(length() - index);
    if (name == "revindex0") return Value::of(length() - index - 1);
    if (name == "previtem") return previous;
    if (name == "nextitem") return is_last() ? Value() : ahead.front();
    work.refuse<Unsupported>("'loop.", name, "' is not read");
  }
};

namespace {

enum class Flow : std::uint8_t { on, next, out };

constexpr int kDeepestRun = 500;
constexpr std::uint64_t kStep = 8;  // of a step, in bytes

std::string date_text(std::chrono::year_month_day date, std::string_view format, const Work& work) {
  static constexpr std::string_view kMonths[] = {"January", "February", "March",     "April",   "May",      "June",
                                                 "July",    "August",   "September", "October", "November", "December"};
  static constexpr std::string_view kDays[] = {"Sunday",   "Monday", "Tuesday", "Wednesday",
                                               "Thursday", "Friday", "Saturday"};
  const auto month = static_cast<unsigned>(date.month()), day = static_cast<unsigned>(date.day());
  const std::string_view month_name = kMonths[month - 1], day_name = kDays[std::chrono::weekday(date).c_encoding()];
  const auto digits = [](unsigned number) { return text(number < 10 ? "0" : "", number); };
  std::string out;
  for (std::size_t at = 0; at < format.size(); ++at) {
    if (format[at] != '%') {
      out += format[at];
      continue;
    }
    switch (const char wanted = ++at < format.size() ? format[at] : '\0'; wanted) {
      case 'd':
        out += digits(day);
        break;
      case 'm':
        out += digits(month);
        break;
      case 'Y':
        out += text(static_cast<int>(date.year()));
        break;
      case 'B':
      case 'b':
        out += wanted == 'B' ? month_name : month_name.substr(0, 3);
        break;
      case 'A':
      case 'a':
        out += wanted == 'A' ? day_name : day_name.substr(0, 3);
        break;
      case '%':
        out += '%';
        break;
      default:
        work.refuse<Unsupported>("strftime_now('%", wanted,
                                 "'); allowed the days, months and years %d %m %Y %B %b %A %a");
    }
  }
  return out;
}

class Renderer {
 public:
  Renderer(std::chrono::year_month_day date, Work& work) : date_(date), work_(work) {}

  std::string whole(const Node& tree, std::vector<std::pair<std::string, Value>> names) {
    Scope scope;
    for (const std::string_view function : {"namespace", "range", "raise_exception", "strftime_now"})
      scope.names.emplace(function, Value{.kind = Kind::function});
    for (auto& [name, value] : names) scope.names.insert_or_assign(std::move(name), std::move(value));
    return captured(tree, scope);
  }

 private:
  // A step at a node: within the work that is left, and not too deep.
  class Step {
   public:
    Step(Renderer& of, const Node& node) : of_(of) {
      of.work_.line = node.line;
      of.work_.spend(kStep);
      if (of.depth_ >= kDeepestRun) of.work_.refuse("macros call each other too deeply");
      ++of.depth_;
    }
    ~Step() { --of_.depth_; }
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    Renderer& of_;
  };

  void write(std::string_view said) {
    work_.spend(said.size());
    *out_ += said;
  }

  // What a body writes, apart from the rest.
  std::string captured(const Node& body, Scope& scope) {
    std::string text;
    std::string* around = std::exchange(out_, &text);
    run(body, scope);
    out_ = around;
    return text;
  }

  // Statements.

  Flow run(const Node& node, Scope& scope) {
    const Step step(*this, node);
    switch (node.kind) {
      case NodeKind::body:
        for (const auto& part : node.parts)
          if (const Flow flow = run(*part, scope); flow != Flow::on) return flow;
        return Flow::on;
      case NodeKind::data:
        write(node.value.text());
        return Flow::on;
      case NodeKind::output:
        write(printed(value(*node.parts[0], scope), work_));
        return Flow::on;
      case NodeKind::set:
      case NodeKind::set_block:
        set(node, scope);
        return Flow::on;
      case NodeKind::choice:
        return choose(node, scope);
      case NodeKind::loop:
        return loop(node, scope);
      case NodeKind::macro:
        scope.macros.push_back({&node, &scope});
        assign(scope, node.text, Value{.kind = Kind::macro, .macro = &scope.macros.back()});
        return Flow::on;
      case NodeKind::scope: {
        Scope inside{.around = &scope};
        return run(*node.parts[0], inside);
      }
      case NodeKind::break_:
        return Flow::out;
      default:
        return Flow::next;
    }
  }

  void assign(Scope& scope, const std::string& name, Value value) {
    work_.spend(sizeof(Value) + name.size());
    scope.names.insert_or_assign(name, std::move(value));
  }

  void assign(Scope& scope, const std::vector<std::string>& names, const Value& value) {
    if (names.size() == 1) return assign(scope, names[0], value);
    const std::vector<Value> items = items_of(value, work_);
    if (items.size() != names.size())
      work_.refuse("it unpacks ", items.size(), " values into ", names.size(), " names");
    for (std::size_t i = 0; i < names.size(); ++i) assign(scope, names[i], items[i]);
  }

  void set(const Node& node, Scope& scope) {
    Value given;
    if (node.kind == NodeKind::set) {
      given = value(*node.parts[0], scope);
    } else {
      Scope inside{.around = &scope};
      given = made(captured(*node.parts[0], inside), work_);
    }
    if (node.text.empty()) return assign(scope, node.names, given);
    const Value* space = scope.find(node.names[0]);
    if (space == nullptr || !space->is(Kind::space)) work_.refuse("'", node.names[0], "' is not a namespace");
    static_cast<void>(depth_around({given}, work_));
    Held& held = *space->held;
    work_.spend(held.names.size());
    const auto at = std::ranges::find(held.names, node.text);
    if (at != held.names.end()) {
      held.values[static_cast<std::size_t>(at - held.names.begin())] = std::move(given);
    } else {
      work_.spend(sizeof(Value) + node.text.size());
      held.names.push_back(node.text);
      held.values.push_back(std::move(given));
    }
  }

  Flow choose(const Node& node, Scope& scope) {
    std::size_t at = 0;
    for (; at + 1 < node.parts.size(); at += 2)
      if (value(*node.parts[at], scope).truth()) return run(*node.parts[at + 1], scope);
    return at < node.parts.size() ? run(*node.parts[at], scope) : Flow::on;
  }

  Flow loop(const Node& node, Scope& scope) {
    const auto passes = [&](const Value& item) {
      if (!node.parts[1]) return true;
      Scope inside{.around = &scope};
      assign(inside, node.names, item);
      return value(*node.parts[1], inside).truth();
    };
    Loop at{.items = items_of(value(*node.parts[0], scope), work_), .passes = passes};
    bool finished = false;  // whether a body ran to its end: {% else %} is for loops without one, as in jinja2
    while (at.advance()) {
      Scope inside{.around = &scope};
      assign(inside, "loop", Value{.kind = Kind::loop, .loop = &at});
      assign(inside, node.names, at.current);
      const Flow flow = run(*node.parts[2], inside);
      if (flow == Flow::out) break;
      finished |= flow == Flow::on;
    }
    if (finished || !node.parts[3]) return Flow::on;
    Scope inside{.around = &scope};
    return run(*node.parts[3], inside);
  }

  // Expressions.

  Value value(const Node& node, const Scope& scope) {
    const Step step(*this, node);
    switch (node.kind) {
      case NodeKind::literal:
        return node.value;
      case NodeKind::name: {
        const Value* found = scope.find(node.text);
        return found != nullptr ? *found : Value();
      }
      case NodeKind::attribute:
        return attribute(value(*node.parts[0], scope), node);
      case NodeKind::item:
      case NodeKind::slice:
      case NodeKind::arithmetic:
        return operation(node, values(node, scope));
      case NodeKind::call:
        return call(node, scope);
      case NodeKind::method:
      case NodeKind::filter:
      case NodeKind::test: {
        const std::vector<Value> given = values(node, scope);
        work_.line = node.line;
        if (node.kind == NodeKind::method && given[0].is(Kind::undefined))
          work_.refuse("an undefined value has no '", node.builtin->name, "'");
        return node.builtin->apply(given[0], std::span(given).subspan(1), work_);
      }
      case NodeKind::negative: {
        std::int64_t number = integer_of(value(*node.parts[0], scope), work_);
        if (__builtin_sub_overflow(std::int64_t{0}, number, &number)) work_.refuse<Unsupported>("a number beyond 2^63");
        return Value::of(number);
      }
      case NodeKind::negation:
        return Value::of(!value(*node.parts[0], scope).truth());
      case NodeKind::concat:
        return concat(values(node, scope));
      case NodeKind::comparison:
        return comparison(node, scope);
      case NodeKind::either:
      case NodeKind::both: {
        Value left = value(*node.parts[0], scope);
        return left.truth() == (node.kind == NodeKind::either) ? left : value(*node.parts[1], scope);
      }
      case NodeKind::conditional:
        if (value(*node.parts[0], scope).truth()) return value(*node.parts[1], scope);
        return node.parts.size() > 2 ? value(*node.parts[2], scope) : Value();
      case NodeKind::dict:
        return made_dict(node.names, values(node, scope), work_);
      default:
        return made(node.kind == NodeKind::list ? Kind::list : Kind::tuple, values(node, scope), work_);
    }
  }

  std::vector<Value> values(const Node& node, const Scope& scope) {
    std::vector<Value> all;
    for (const auto& part : node.parts) all.push_back(part ? value(*part, scope) : Value());
    work_.line = node.line;
    return all;
  }

  Value attribute(const Value& of, const Node& node) {
    work_.line = node.line;
    return of.is(Kind::loop) ? of.loop->attribute(node.text, work_) : attribute_of(of, node.text, work_);
  }

  Value concat(const std::vector<Value>& given) {
    std::string joined;
    for (const Value& one : given) joined += printed(one, work_);
    return made(std::move(joined), work_);
  }

  Value operation(const Node& node, const std::vector<Value>& given) {
    const Value &a = given[0], &b = given[1];
    if (node.kind == NodeKind::item) return item_of(a, b, work_);
    if (node.kind == NodeKind::slice) return slice_of(a, b, given[2], given[3], work_);
    const char sign = node.text[0];
    if (sign == '+' && (a.is(Kind::list) || a.is(Kind::tuple)) && a.kind == b.kind) {
      std::vector<Value> both = items_of(a, work_), more = items_of(b, work_);
      both.insert(both.end(), more.begin(), more.end());
      return made(a.kind, std::move(both), work_);
    }
    if (sign == '+' && (a.is_string() || b.is_string())) return made(text(text_of(a, work_), text_of(b, work_)), work_);
    if (sign == '*' && (a.is_string() || b.is_string())) {
      const std::string_view once = text_of(a.is_string() ? a : b, work_);
      std::string many;
      for (std::int64_t times = integer_of(a.is_string() ? b : a, work_); times > 0; --times) {
        work_.spend(1 + once.size());
        many += once;
      }
      return made(std::move(many), work_);
    }
    return Value::of(number(sign, integer_of(a, work_), integer_of(b, work_)));
  }

  [[nodiscard]] std::int64_t number(char sign, std::int64_t a, std::int64_t b) const {
    std::int64_t result = 0;
    if (sign == '%') {
      if (b == 0) work_.refuse("a remainder by 0");
      result = b == -1 ? 0 : a % b;
      return result != 0 && (result < 0) != (b < 0) ? result + b : result;
    }
    const bool beyond = sign == '+'   ? __builtin_add_overflow(a, b, &result)
                        : sign == '-' ? __builtin_sub_overflow(a, b, &result)
                                      : __builtin_mul_overflow(a, b, &result);
    if (beyond) work_.refuse<Unsupported>("a number beyond 2^63");
    return result;
  }

  Value comparison(const Node& node, const Scope& scope) {
    Value left = value(*node.parts[0], scope);
    for (std::size_t i = 0; i < node.names.size(); ++i) {
      Value right = value(*node.parts[i + 1], scope);
      work_.line = node.line;
      if (!holds(left, node.names[i], right)) return Value::of(false);
      left = std::move(right);
    }
    return Value::of(true);
  }

  bool holds(const Value& a, std::string_view operation, const Value& b) {
    if (operation == "==" || operation == "!=") return equal(a, b, work_) == (operation == "==");
    if (operation == "in" || operation == "not in") return contains(b, a, work_) == (operation == "in");
    if (!(a.is_number() && b.is_number()) && !(a.is_string() && b.is_string()))
      work_.refuse("'", operation, "' between ", name_of(a.kind), " and ", name_of(b.kind));
    if (a.is_string()) work_.spend(a.text().size());
    const auto order = a.is_string() ? a.text() <=> b.text() : a.number <=> b.number;
    const bool less = operation[0] == '<';
    return order == 0 ? operation.size() == 2 : (order < 0) == less;
  }

  Value call(const Node& node, const Scope& scope) {
    std::vector<Value> given = values(node, scope);
    const Value* called = scope.find(node.text);
    if (called != nullptr && called->is(Kind::macro)) return call_macro(*called->macro, node, std::move(given));
    if (called == nullptr || !called->is(Kind::function)) work_.refuse("'", node.text, "' is not a function");
    if (node.text == "namespace") return space(node, std::move(given));
    if (!node.names.empty()) work_.refuse<Unsupported>("arguments of '", node.text, "' have names");
    if (node.text == "range") return range(given);
    if (given.size() != 1) work_.refuse("'", node.text, "' takes one argument");
    if (node.text == "strftime_now") return made(date_text(date_, text_of(given[0], work_), work_), work_);
    kvkeep::refuse<InvalidArgument>("render chat: the template refuses the messages: ",
                                    shortened(printed(given[0], work_)));
  }

  Value space(const Node& node, std::vector<Value> given) {
    if (node.names.size() != given.size()) work_.refuse<Unsupported>("an argument of 'namespace' has no name");
    for (const std::string& name : node.names)
      if (name.starts_with('_')) work_.refuse<Unsupported>("'", name, "' in a namespace is private");
    Value made = made_dict(node.names, std::move(given), work_);
    made.kind = Kind::space;
    return made;
  }

  Value range(const std::vector<Value>& given) {
    constexpr std::int64_t kLongest = 100000;  // jinja2's MAX_RANGE
    if (given.empty() || given.size() > 3) work_.refuse("'range' takes one to three arguments");
    const std::int64_t first = given.size() > 1 ? integer_of(given[0], work_) : 0;
    const std::int64_t end = integer_of(given[given.size() > 1 ? 1 : 0], work_);
    const std::int64_t step = given.size() > 2 ? integer_of(given[2], work_) : 1;
    if (step == 0) work_.refuse("the step of a range is 0");
    std::vector<Value> all;
    for (std::int64_t at = first; step > 0 ? at < end : at > end;) {
      if (std::ssize(all) == kLongest) work_.refuse("a range of more than ", kLongest, " numbers");
      all.push_back(Value::of(at));
      if (__builtin_add_overflow(at, step, &at)) break;
    }
    return made(Kind::list, std::move(all), work_);
  }

  Value call_macro(const Macro& macro, const Node& call, std::vector<Value> given) {
    const std::vector<std::string>& parameters = macro.node->names;
    const std::size_t placed = given.size() - call.names.size();
    if (placed > parameters.size()) work_.refuse("the macro '", call.text, "' takes fewer arguments");
    std::vector<std::optional<Value>> values(parameters.size());
    for (std::size_t i = 0; i < given.size(); ++i) {
      const auto at =
          i < placed
              ? i
              : static_cast<std::size_t>(std::ranges::find(parameters, call.names[i - placed]) - parameters.begin());
      if (at >= parameters.size() || values[at])
        work_.refuse("the macro '", call.text, "' takes no '", call.names[i - placed], "', or has it already");
      values[at] = std::move(given[i]);
    }
    Scope inside{.around = macro.around};
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& preset = macro.node->parts[i];
      Value filled = values[i] ? std::move(*values[i]) : preset ? value(*preset, inside) : Value();
      assign(inside, parameters[i], std::move(filled));
    }
    return made(captured(*macro.node->parts.back(), inside), work_);
  }

  std::chrono::year_month_day date_;
  Work& work_;
  std::string* out_ = nullptr;
  int depth_ = 0;
};

}  // namespace

std::string render(const Node& tree, std::vector<std::pair<std::string, Value>> names, std::chrono::year_month_day date,
                   Work& work) {
  return Renderer(date, work).whole(tree, std::move(names));
}

}  // namespace kvkeep::lm::jinja
