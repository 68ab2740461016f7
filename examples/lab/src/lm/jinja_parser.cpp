// SPDX-License-Identifier: Apache-2.0
#include "jinja_parser.h"

#include <algorithm>
#include <array>
#include <utility>

#include "jinja_builtins.h"
#include "jinja_lexer.h"

namespace kvkeep::lm::jinja {
namespace {

using NodePtr = std::unique_ptr<Node>;

constexpr int kDeepestTree = 200;  // a rendering recurses as deep
constexpr std::string_view kFunctions = " namespace range raise_exception strftime_now ";
constexpr std::string_view kReserved =
    " and or not in is if else elif for endfor true false none True False None caller varargs kwargs self super dict "
    "lipsum cycler joiner ";

bool is_listed(std::string_view list, std::string_view name) {
  return list.find(text(" ", name, " ")) != std::string_view::npos;
}

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  NodePtr tree() && {
    NodePtr whole = body({});
    for (const auto& [name, line] : called_)
      if (std::ranges::find(macros_, name) == macros_.end())
        refuse_template(line, "the function '", shortened(name), "' is not known");
    return whole;
  }

 private:
  [[nodiscard]] const Token& now() const { return tokens_[at_]; }
  [[nodiscard]] const Token& next() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }

  const Token& take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }

  bool skip(std::string_view wanted) {
    const bool is = now().is(wanted);
    if (is) take();
    return is;
  }

  template <class... Parts>
  [[noreturn]] void refuse_here(const Parts&... parts) const {
    refuse_template(now().line, parts...);
  }

  [[noreturn]] void refuse_token() const {
    const bool named = !now().text.empty() && now().kind != Token::Kind::data;
    refuse_here(named ? text("'", shortened(now().text), "'") : std::string("the end of a tag or of the template"),
                " is not expected here");
  }

  void expect(std::string_view wanted) {
    if (!skip(wanted)) refuse_token();
  }

  void expect(Token::Kind wanted) {
    if (now().kind != wanted) refuse_token();
    take();
  }

  std::string name() {
    if (now().kind != Token::Kind::name || is_listed(kReserved, now().text)) refuse_token();
    return take().text;
  }

  [[nodiscard]] NodePtr node(NodeKind kind) const {
    return std::make_unique<Node>(Node{.kind = kind, .line = now().line});
  }

  void add(Node& to, NodePtr part) const {
    if (part) to.depth = std::max(to.depth, part->depth + 1);
    if (to.depth > kDeepestTree) refuse_here("it nests too deeply");
    to.parts.push_back(std::move(part));
  }

  template <class... Parts>
  NodePtr node(NodeKind kind, std::uint32_t line, Parts... parts) const {
    NodePtr made = node(kind);
    made->line = line;
    (add(*made, std::move(parts)), ...);
    return made;
  }

  [[nodiscard]] NodePtr literal(Value value) const {
    NodePtr made = node(NodeKind::literal);
    made->value = std::move(value);
    return made;
  }

  // Statements.

  NodePtr body(std::initializer_list<std::string_view> ends) {
    NodePtr all = node(NodeKind::body);
    if (++nested_ > kDeepestTree / 2) refuse_here("it nests too deeply");
    while (true) {
      if (now().kind == Token::Kind::data) {
        NodePtr data = node(NodeKind::data);
        data->value = Value::of(take().text);
        add(*all, std::move(data));
      } else if (now().kind == Token::Kind::output_begin) {
        const std::uint32_t line = take().line;
        add(*all, node(NodeKind::output, line, tuple()));
        expect(Token::Kind::output_end);
      } else if (now().kind == Token::Kind::begin) {
        if (std::ranges::any_of(ends, [&](std::string_view end) { return next().is(end); })) break;
        take();
        add(*all, statement());
        expect(Token::Kind::end);
      } else {
        if (ends.size() > 0) refuse_here("{% ", *(ends.end() - 1), " %} is missing");
        break;
      }
    }
    --nested_;
    return all;
  }

  // A body that ends with the tag `end`, whose last token is left.
  NodePtr body_until(std::string_view end) {
    expect(Token::Kind::end);
    NodePtr inside = body({end});
    take();
    take();
    return inside;
  }

  // The same for a body that {% break %} cannot leave.
  NodePtr inner_body_until(std::string_view end) {
    const int around = std::exchange(loops_, 0);
    NodePtr inside = body_until(end);
    loops_ = around;
    return inside;
  }

  NodePtr statement() {
    if (now().kind != Token::Kind::name) refuse_token();
    const Token tag = take();
    if (tag.text == "set") return set(tag.line);
    if (tag.text == "if") return choice(tag.line);
    if (tag.text == "for") return loop(tag.line);
    if (tag.text == "macro") return macro(tag.line);
    if (tag.text == "generation") return node(NodeKind::scope, tag.line, inner_body_until("endgeneration"));
    if (tag.text == "break" || tag.text == "continue") {
      if (loops_ == 0) refuse_template(tag.line, "{% ", tag.text, " %} stands outside of a loop");
      return node(tag.text == "break" ? NodeKind::break_ : NodeKind::continue_, tag.line);
    }
    refuse_template(tag.line, "the tag {% ", shortened(tag.text), " %} is not known here");
  }

  std::vector<std::string> targets() {
    std::vector<std::string> names;
    const bool bracket = skip("(");
    do {
      names.push_back(name());
    } while (skip(",") && now().kind == Token::Kind::name);
    if (bracket) expect(")");
    return names;
  }

  NodePtr set(std::uint32_t line) {
    NodePtr made = node(NodeKind::set, line);
    made->names = targets();
    if (made->names.size() == 1 && skip(".")) made->text = attribute_name();
    if (skip("=")) {
      add(*made, tuple());
    } else {
      if (made->names.size() > 1) refuse_token();
      made->kind = NodeKind::set_block;
      add(*made, inner_body_until("endset"));
    }
    return made;
  }

  NodePtr choice(std::uint32_t line) {
    NodePtr made = node(NodeKind::choice, line);
    while (true) {
      add(*made, tuple(false));
      expect(Token::Kind::end);
      add(*made, body({"elif", "else", "endif"}));
      take();
      if (skip("elif")) continue;
      if (skip("else")) {
        add(*made, body_until("endif"));
        return made;
      }
      take();
      return made;
    }
  }

  NodePtr loop(std::uint32_t line) {
    NodePtr made = node(NodeKind::loop, line);
    made->names = targets();
    expect("in");
    add(*made, tuple(false));
    add(*made, skip("if") ? expression() : nullptr);
    if (now().is("recursive")) refuse_here("a recursive loop is not read");
    expect(Token::Kind::end);
    ++loops_;
    add(*made, body({"else", "endfor"}));
    --loops_;
    take();
    NodePtr otherwise;
    if (now().is("else")) {
      take();
      otherwise = body_until("endfor");
    } else {
      take();
    }
    add(*made, std::move(otherwise));
    return made;
  }

  NodePtr macro(std::uint32_t line) {
    NodePtr made = node(NodeKind::macro, line);
    made->text = name();
    macros_.push_back(made->text);
    expect("(");
    while (!skip(")")) {
      if (!made->names.empty()) expect(",");
      made->names.push_back(name());
      add(*made, skip("=") ? expression() : nullptr);
      if (!made->parts.back() && made->parts.size() > 1 && made->parts[made->parts.size() - 2])
        refuse_here("a parameter without a default follows one with a default");
    }
    add(*made, inner_body_until("endmacro"));
    return made;
  }

  // Expressions, from the weakest operation to the strongest.

  NodePtr tuple(bool conditionals = true) {
    const std::uint32_t line = now().line;
    NodePtr first = conditionals ? expression() : either();
    if (!now().is(",")) return first;
    NodePtr made = node(NodeKind::tuple, line, std::move(first));
    while (skip(",") && !ends_tuple()) add(*made, conditionals ? expression() : either());
    return made;
  }

  [[nodiscard]] bool ends_tuple() const {
    return now().kind == Token::Kind::end || now().kind == Token::Kind::output_end || now().is(")") || now().is("]");
  }

  NodePtr expression() {
    const std::uint32_t line = now().line;
    if (++nested_ > kDeepestTree / 2) refuse_here("it nests too deeply");
    NodePtr made = either();
    while (skip("if")) {
      NodePtr condition = either();
      made = node(NodeKind::conditional, line, std::move(condition), std::move(made));
      if (skip("else")) add(*made, expression());
    }
    --nested_;
    return made;
  }

  // Operations of one strength, from left to right.
  NodePtr chain(NodeKind kind, std::initializer_list<std::string_view> operations, NodePtr (Parser::*operand)()) {
    NodePtr made = (this->*operand)();
    while (std::ranges::any_of(operations, [&](std::string_view one) { return now().is(one); })) {
      const Token operation = take();
      made = node(kind, operation.line, std::move(made), (this->*operand)());
      made->text = operation.text;
    }
    return made;
  }

  NodePtr either() { return chain(NodeKind::either, {"or"}, &Parser::both); }
  NodePtr both() { return chain(NodeKind::both, {"and"}, &Parser::negation); }
  NodePtr sum() { return chain(NodeKind::arithmetic, {"+", "-"}, &Parser::concat); }

  NodePtr negation() {
    std::vector<std::uint32_t> nots;
    while (now().is("not")) nots.push_back(take().line);
    NodePtr made = comparison();
    for (; !nots.empty(); nots.pop_back()) made = node(NodeKind::negation, nots.back(), std::move(made));
    return made;
  }

  NodePtr comparison() {
    const std::uint32_t line = now().line;
    NodePtr made = sum();
    std::vector<std::string> operations;
    while (true) {
      const bool not_in = now().is("not") && next().is("in");
      if (!not_in && !now().is("in") && !is_listed(" == != < <= > >= ", now().is(now().text) ? now().text : "")) break;
      if (operations.empty()) made = node(NodeKind::comparison, line, std::move(made));
      operations.emplace_back(not_in ? "not in" : now().text);
      take();
      if (not_in) take();
      add(*made, sum());
    }
    if (!operations.empty()) made->names = std::move(operations);
    return made;
  }

  NodePtr concat() {
    NodePtr made = product();
    if (!now().is("~")) return made;
    made = node(NodeKind::concat, now().line, std::move(made));
    while (skip("~")) add(*made, product());
    return made;
  }

  NodePtr product() {
    NodePtr made = chain(NodeKind::arithmetic, {"*", "%"}, &Parser::factor);
    if (now().is("/") || now().is("//") || now().is("**")) refuse_here("the operation '", now().text, "' is not read");
    return made;
  }

  NodePtr factor() { return filters(unary()); }

  NodePtr unary() {
    if (now().is("+")) refuse_here("a sign '+' is not read");
    if (!now().is("-")) return postfix(primary());
    const std::uint32_t line = take().line;
    if (now().is("-")) refuse_token();
    return postfix(node(NodeKind::negative, line, unary()));
  }

  NodePtr primary() {
    const Token token = now();
    if (token.kind == Token::Kind::integer) {
      take();
      return literal(Value::of(static_cast<std::int64_t>(std::stoll(token.text))));
    }
    if (token.kind == Token::Kind::string) {
      std::string joined;
      while (now().kind == Token::Kind::string) joined += take().text;
      return literal(Value::of(std::move(joined)));
    }
    if (skip("true") || skip("True")) return literal(Value::of(true));
    if (skip("false") || skip("False")) return literal(Value::of(false));
    if (skip("none") || skip("None")) return literal(Value{.kind = Kind::none});
    if (skip("(")) {
      NodePtr made = now().is(")") ? node(NodeKind::tuple) : tuple();
      expect(")");
      return made;
    }
    if (skip("[")) {
      NodePtr made = node(NodeKind::list, token.line);
      while (!skip("]")) {
        if (!made->parts.empty()) expect(",");
        if (!now().is("]")) add(*made, expression());
      }
      return made;
    }
    if (skip("{")) return dict(token.line);
    NodePtr made = node(NodeKind::name);
    made->text = name();
    return made;
  }

  NodePtr dict(std::uint32_t line) {
    NodePtr made = node(NodeKind::dict, line);
    while (!skip("}")) {
      if (!made->parts.empty()) expect(",");
      if (now().is("}")) continue;
      if (now().kind != Token::Kind::string) refuse_here("a dict has strings only for keys");
      std::string key = take().text;
      if (std::ranges::find(made->names, key) != made->names.end()) refuse_here("a dict repeats a key");
      made->names.push_back(std::move(key));
      expect(":");
      add(*made, expression());
    }
    return made;
  }

  std::string attribute_name() {
    if (now().kind != Token::Kind::name) refuse_token();
    if (now().text.starts_with('_')) refuse_here("the attribute '", shortened(now().text), "' is private");
    return take().text;
  }

  NodePtr postfix(NodePtr made) {
    while (true) {
      const std::uint32_t line = now().line;
      if (skip(".")) {
        std::string called = attribute_name();
        made = now().is("(") ? method(line, called, std::move(made)) : node(NodeKind::attribute, line, std::move(made));
        if (made->kind == NodeKind::attribute) made->text = std::move(called);
      } else if (skip("[")) {
        made = subscript(line, std::move(made));
      } else if (now().is("(")) {
        if (made->kind != NodeKind::name)
          refuse_here("a call of anything but functions, macros and methods is not read");
        made->kind = NodeKind::call;
        if (!is_listed(kFunctions, made->text)) called_.emplace_back(made->text, line);
        arguments(*made, nullptr);
      } else {
        return made;
      }
    }
  }

  NodePtr subscript(std::uint32_t line, NodePtr of) {
    std::array<NodePtr, 3> bounds;
    std::size_t bound = 0;
    while (!now().is("]")) {
      if (skip(":")) {
        if (++bound == 3) refuse_token();
      } else if (!bounds[bound]) {
        bounds[bound] = expression();
      } else {
        refuse_token();
      }
    }
    if (bound == 0 && !bounds[0]) refuse_token();
    take();
    if (bound == 0) return node(NodeKind::item, line, std::move(of), std::move(bounds[0]));
    for (NodePtr& one : bounds)
      if (!one) one = literal(Value{.kind = Kind::none});
    return node(NodeKind::slice, line, std::move(of), std::move(bounds[0]), std::move(bounds[1]), std::move(bounds[2]));
  }

  NodePtr method(std::uint32_t line, const std::string& called, NodePtr of) {
    const Builtin* known = find_method(called);
    if (known == nullptr) refuse_template(line, "the method '", shortened(called), "' is not known");
    NodePtr made = node(NodeKind::method, line, std::move(of));
    made->builtin = known;
    arguments(*made, known);
    return made;
  }

  // In brackets. Those of a builtin are put where its parameters are; those of other calls keep their names.
  void arguments(Node& to, const Builtin* builtin) {
    expect("(");
    const std::size_t before = to.parts.size();
    while (!skip(")")) {
      if (to.parts.size() > before) expect(",");
      if (now().is(")")) continue;
      if (now().is("*") || now().is("**")) refuse_here("arguments out of a list or dict are not read");
      std::string by_name = now().kind == Token::Kind::name && next().is("=") ? take().text : std::string();
      if (by_name.empty() && !to.names.empty()) refuse_token();
      if (!by_name.empty()) {
        take();
        if (std::ranges::find(to.names, by_name) != to.names.end()) refuse_here("an argument is given twice");
        to.names.push_back(std::move(by_name));
      }
      add(to, expression());
    }
    if (builtin != nullptr) place_arguments(to, *builtin, before);
  }

  void place_arguments(Node& to, const Builtin& builtin, std::size_t before) const {
    const auto& parameters = builtin.parameters;
    const bool open = !parameters.empty() && parameters.back() == "*";
    const std::size_t known = parameters.size() - (open ? 1 : 0);
    const std::size_t placed = to.parts.size() - before - to.names.size();
    if (placed > known && !open) refuse_here("'", builtin.name, "' is given more arguments than are read");
    std::vector<std::unique_ptr<const Node>> named(
        std::make_move_iterator(to.parts.begin() + static_cast<std::ptrdiff_t>(before + placed)),
        std::make_move_iterator(to.parts.end()));
    to.parts.resize(before + placed);
    for (std::size_t i = 0; i < named.size(); ++i) {
      const auto at = static_cast<std::size_t>(std::ranges::find(parameters, to.names[i]) - parameters.begin());
      if (at >= known || at < placed)
        refuse_here("the argument '", shortened(to.names[i]), "' of '", builtin.name, "' is not read");
      to.parts.resize(std::max(to.parts.size(), before + at + 1));
      to.parts[before + at] = std::move(named[i]);
    }
    to.names.clear();
  }

  NodePtr filters(NodePtr made) {
    while (true) {
      const std::uint32_t line = now().line;
      if (skip("|")) {
        made = builtin(NodeKind::filter, line, std::move(made));
        if (now().is("(")) arguments(*made, made->builtin);
        if (const int at = place_of_name(*made->builtin); at >= 0) check_name(*made, static_cast<std::size_t>(at) + 1);
      } else if (skip("is")) {
        const bool negated = skip("not");
        made = test(line, std::move(made));
        if (negated) made = node(NodeKind::negation, line, std::move(made));
      } else {
        return made;
      }
    }
  }

  NodePtr builtin(NodeKind kind, std::uint32_t line, NodePtr of) {
    if (now().kind != Token::Kind::name) refuse_token();
    const std::string called = take().text;
    const bool filter = kind == NodeKind::filter;
    const Builtin* known = filter ? find_filter(called) : find_test(called);
    if (known == nullptr)
      refuse_template(line, filter ? "the filter '" : "the test '", shortened(called), "' is not known");
    NodePtr made = node(kind, line, std::move(of));
    made->builtin = known;
    return made;
  }

  NodePtr test(std::uint32_t line, NodePtr of) {
    NodePtr made = builtin(NodeKind::test, line, std::move(of));
    if (now().is("is")) refuse_token();
    if (now().is("(")) {
      arguments(*made, made->builtin);
    } else if (!made->builtin->parameters.empty()) {
      add(*made, postfix(primary()));
    }
    if (made->parts.size() != 1 + made->builtin->parameters.size())
      refuse_here("the test '", made->builtin->name, "' is given too few arguments");
    return made;
  }

  // map('upper'), selectattr('role', 'equalto', ...): a name that is known only as it runs could not be checked.
  void check_name(const Node& filter, std::size_t at) const {
    if (at >= filter.parts.size() || !filter.parts[at]) return;
    const Node& given = *filter.parts[at];
    if (given.kind != NodeKind::literal || !given.value.is_string())
      refuse_here("the name that '", filter.builtin->name, "' is given is not a string");
    const bool maps = filter.builtin->name == "map";
    if ((maps ? find_filter(given.value.text()) : find_test(given.value.text())) == nullptr)
      refuse_here(maps ? "the filter '" : "the test '", shortened(given.value.text()), "' is not known");
  }

  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  int nested_ = 0, loops_ = 0;
  std::vector<std::string> macros_;
  std::vector<std::pair<std::string, std::uint32_t>> called_;
};

}  // namespace

std::unique_ptr<const Node> parse(std::string_view jinja) { return Parser(tokens_of(jinja)).tree(); }

}  // namespace kvkeep::lm::jinja
