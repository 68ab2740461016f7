// SPDX-License-Identifier: Apache-2.0
#include "words.h"

#include <array>

namespace kvkeep::lm {
namespace {

/// The words of a text, which must hold `count` of them.
template <std::size_t count>
constexpr std::array<std::string_view, count> split(std::string_view text) {
  std::array<std::string_view, count> words{};
  for (std::string_view& word : words) {
    const std::size_t end = text.find(' ');
    word = text.substr(0, end);
    text.remove_prefix(end + 1);
  }
  if (!text.empty()) throw "more words than were counted";  // does not compile
  return words;
}

constexpr auto kAdjectives = split<214>(
    "absent ancient anxious awake bitter bold brave brief bright broad calm careful central certain charming cheap "
    "cheerful "
    "chilly clean clear clever cloudy coarse common complete constant cozy crisp curious curly daily damp dark dear "
    "deep "
    "delicate dense distant dizzy double dusty eager early easy elegant empty endless entire equal exact faint fair "
    "faithful "
    "famous fancy fierce final flat fluffy fond foreign formal fragile frank fresh friendly frozen funny generous "
    "gentle "
    "giant glad golden graceful grand grateful gray great green handy happy harsh healthy heavy helpful hidden hollow "
    "honest "
    "huge humble hungry idle innocent jolly kind large lasting lazy likely little lively local lonely loose lovely "
    "loyal "
    "lucky mature mellow merry mild modern modest mute narrow native neat nervous noble noisy normal orange pale "
    "patient "
    "perfect pleasant polite poor precious pretty private proper proud public pure purple quick quiet random rapid "
    "rare ready "
    "recent regular rough royal rural rusty sacred safe salty secret serious shallow sharp shiny short silent silly "
    "silver "
    "simple slender slim slow smart smooth soft solid sour special spicy square steady steep sticky stiff strange "
    "strict "
    "strong sturdy sudden sunny sweet swift tame tender thick tidy tiny tired tough upper urban useful usual vague "
    "vast vivid "
    "warm weak wealthy weary weird white whole wide wild wise witty wooden woolly worthy yellow young ");

constexpr auto kNouns = split<538>(
    "acorn airport alarm album anchor ankle apple apron arena armor army artist atlas attic aunt author autumn avenue "
    "bacon "
    "badge bakery balcony ballet bamboo banana banker banner barrel basin basket beach beacon beard beaver bedroom "
    "beetle "
    "bell bench berry bicycle biscuit blanket blizzard blossom boat bonnet bottle boulder bowl branch brass bread "
    "breeze "
    "brick bridge broom brother brush bubble bucket buffalo bugle building bullet bundle bureau butcher butter button "
    "cabbage "
    "cabin cactus camel camera campus canal candle canoe canvas canyon captain caravan carpet carriage carrot castle "
    "cathedral cattle cavern ceiling cellar cement century cereal chain chair chalk chamber chapel chapter cheese "
    "cherry "
    "chess chestnut chicken chimney choir cinema circle citizen clay client cliff clinic cloak clock cloth clover "
    "coach coast "
    "cobbler coffee collar college colony comet compass concert copper coral corner cottage cotton council cousin "
    "cowboy "
    "cradle crane crater crayon cream creek cricket crowd crown crystal cupboard curtain cushion customer dairy daisy "
    "dancer "
    "daughter dawn deck deer desert desk dessert diamond diary dinner doctor dollar dolphin domino donkey door dragon "
    "drawer "
    "dream dress drum duck dungeon eagle earring earth echo eclipse elbow elephant elevator embassy emerald emperor "
    "engineer "
    "envelope essay evening factory falcon family farmer father feather fence fern festival fiddle field finger "
    "fireplace "
    "flag flame flute foam forest fork fortress fountain freezer frog frost fruit furnace galaxy gallery garage garden "
    "garlic "
    "gate geyser ghost ginger giraffe glacier glass glove glue goat goose gorilla grape grass gravel guest guitar "
    "hammer "
    "hammock harbor hatchet hawk hazel heart hedge helmet heron highway hippo holiday honey hood horse hospital hotel "
    "hunter "
    "insect island ivory jacket jaguar jelly jewel journal journey judge jungle kayak kettle keyboard king kitchen "
    "kite "
    "kitten knife knight ladder lagoon lake lamb lamp lantern laptop laundry lawyer leaf leather lemon leopard letter "
    "library "
    "lighthouse lily lime lion lizard lobster locker lodge lumber lunch machine magnet maple marble market marsh "
    "meadow medal "
    "melon mirror mitten monkey month moon moose mosaic mother motor mountain mouse museum mushroom music napkin "
    "needle "
    "nephew notebook novel nurse oatmeal ocean octopus olive onion opera orchard orchestra organ ostrich oven oyster "
    "paddle "
    "painter palace panda panther paper parade parcel parrot pasture peach peacock peanut pearl pebble pelican pencil "
    "penguin "
    "pepper piano picnic pigeon pillow pilot pine pirate pitcher planet plaster plate plum pocket poem poet pond pony "
    "poppy "
    "porch potato pottery prairie prince prison puddle pumpkin puppet pyramid quarry queen quilt rabbit raccoon radio "
    "railway "
    "rainbow raven reef ribbon rice riddle river robin rocket roof rooster rose ruby saddle sailor salad salmon sandal "
    "sauce "
    "scarf school scissors sculptor season senator shadow shark sheep shelf shell sheriff shield ship shirt shoe shore "
    "shoulder sister sketch skirt sled sleeve smoke snail snow soap sock soldier soup spark sparrow spider spinach "
    "spoon "
    "squirrel stable stadium stairs stamp statue stone storm stove straw stream street string student studio sugar "
    "suit "
    "summit surgeon swan sweater sword tailor teacher teapot temple tennis tent theater thistle thorn thread throne "
    "thunder "
    "ticket tiger timber tooth tortoise towel tower town tractor trail train treasure triangle trumpet trunk tulip "
    "tunnel "
    "turkey turnip turtle umbrella uncle uniform valley vase velvet village vine violet violin volcano voyage wagon "
    "waiter "
    "walnut walrus weasel wedding whale wheat wheel whistle widow willow window winter wizard wolf wrist yacht yard "
    "zebra ");

constexpr auto kVerbs = split<308>(
    "accept admire admit advise afford announce answer appear argue arrange arrive attach attend avoid balance become "
    "begin "
    "behave believe belong blink boil borrow bounce breathe bring browse burn calculate call carry catch cause "
    "celebrate "
    "change chase choose chop claim climb collect combine compare compete complain connect consider contain continue "
    "copy "
    "cough count crawl create cross cultivate decide decorate defend deliver depend describe deserve destroy develop "
    "disagree "
    "discover discuss divide drink drive drop educate embrace employ encourage enjoy enter escape examine exist expand "
    "expect "
    "explain explore express extend fail fall fasten feed feel fetch fight fill find finish float flow fold follow "
    "forget "
    "forgive gather glance glow grab grow guard guess guide handle happen hide hold hope hurry imagine improve include "
    "increase inform inspect install invent invite join jump keep kick kneel knit knock know laugh launch learn leave "
    "lift "
    "listen load look lose manage march match measure melt memorize mention miss multiply name notice obey observe "
    "obtain "
    "occur offer order pack pause perform permit pick plant play plead pour practice praise pray prefer prepare "
    "preserve "
    "pretend prevent print produce promise pronounce propose protect provide pull punish push question reach realize "
    "receive "
    "recognize record reduce refuse rejoice relax rely remain remember remind remove repair repeat reply report "
    "request "
    "rescue respect retire return reveal ride roll satisfy save scatter scratch search seek select sell send separate "
    "settle "
    "shake share shave shout show shrink shut sing sink skip sleep slip smell smile sneeze solve sound speak spell "
    "spend "
    "spill split spread squeeze stare stay steal step stir stretch study succeed suffer suggest supply support suppose "
    "surprise surround survive suspect swallow swim switch take talk taste tear tell thank think throw tickle touch "
    "trade "
    "translate travel treat tremble trust twist understand unlock vanish visit vote walk wander want warn wash watch "
    "wave "
    "weigh whisper wipe wish wonder work worry wrap write yawn ");

}  // namespace

std::span<const std::string_view> adjectives() { return kAdjectives; }
std::span<const std::string_view> nouns() { return kNouns; }
std::span<const std::string_view> verbs() { return kVerbs; }

}  // namespace kvkeep::lm
