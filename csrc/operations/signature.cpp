#include "operations/signature.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <string_view>

#include "base/text.h"
#include "compress/compressor.h"
#include "operations/operation.h"

namespace mykv {

std::string shape_text(const std::vector<size_t>& shape) {
  std::string text = "(";
  for (size_t d = 0; d < shape.size(); ++d) text += (d > 0 ? ", " : "") + std::to_string(shape[d]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

namespace {

const std::string kOnGpu = " on GPU";
const std::string kOwners = "the owners of ";

std::string shards_text(const std::vector<Shard>& shards) {
  char digest[24];
  uint64_t hash = 0;
  for (const Shard& shard : shards) {
    const uint64_t numbers[3] = {shard.begin, shard.count, static_cast<uint64_t>(shard.root)};
    hash = hash_bytes(numbers, sizeof numbers, hash);
  }
  std::snprintf(digest, sizeof digest, "%08x", static_cast<unsigned>(hash));
  return kOwners + std::to_string(shards.size()) + " shards (division " + digest + ")";
}

// The beginnings of a label's options, as in step_label.py.
const std::string kBatchSize = "batch size ";
const std::string kLearningRate = "learning rate ";
const std::string kDevices = "devices: ";
const std::string kOptimizer = "optimizer ";
const std::string kSameCalls = "Make the same calls with the same arguments on all workers";
constexpr char kAfterLabel = '\x1f';  // between the label and the core's own description of the operation

std::vector<std::string> options_of(const std::string& label) {
  std::vector<std::string> options(1);
  for (const char c : label) {
    if (c == kBetweenOptions) {
      options.emplace_back();
    } else {
      options.back() += c;
    }
  }
  return options;
}

std::string joined(const std::vector<std::string>& options) {
  std::string text;
  for (const std::string& option : options) text += (text.empty() ? "" : ", ") + option;
  return text;
}

// The arrays in a signature: ' of float32 (3, 4)'.
std::string arrays_of(const std::string& signature) {
  const size_t division = signature.find("(division "), label = signature.find(kAfterLabel);
  const size_t of = signature.find(" of ", division != std::string::npos ? division
                                           : label != std::string::npos  ? label
                                                                         : 0);
  return of == std::string::npos ? "" : signature.substr(of);
}

// arrays_of() without the text after the shape, which says where the arrays are and how they are sent.
std::string shape_of(const std::string& signature) {
  std::string text = arrays_of(signature);
  for (const std::string& rest : {std::string(", as "), std::string(", compressed by "), kOnGpu})
    text = text.substr(0, text.find(rest));
  return text;
}

// The advice at the end of an error. `one` and `other`: the shown parts of the two signatures.
std::string remedy(const std::string& one, const std::string& other, const std::string& signature,
                   const std::string& other_signature) {
  const auto label_of = [](const std::string& text) { return text.substr(0, text.find(kAfterLabel) + 1); };
  const auto both = [&](const std::string& text) {
    return one.find(text) != std::string::npos && other.find(text) != std::string::npos;
  };
  if (both(kBatchSize))
    return "Give step() the same batch size on all workers: the same batch_size in each DataLoader, with "
           "last_batch='discard' or a DistributedSampler";
  if (both(kLearningRate)) return "Set the same learning rate on all workers, before the same step";
  if (both(kDevices)) return "Initialize the network on the same number of devices on all workers";
  if (both(", layout ") || both(kOwners))
    return "Initialize the same parameters in the same order on all workers, and cast or freeze them alike";
  const auto updates = [](const std::string& text) {
    return text.find(kBetweenOptions + kOptimizer) != std::string::npos;
  };
  if (updates(signature) && updates(other_signature) && (both(kOptimizer) || both("=")))
    return "Give the same optimizer, with the same settings, on all workers";
  if (label_of(signature) != label_of(other_signature)) return kSameCalls;
  if (shape_of(signature) != shape_of(other_signature))
    return "Give the same shapes and dtypes on all workers; parameters have them if all workers build the same network";
  const auto travels = [](const std::string& text) { return arrays_of(text).substr(shape_of(text).size()); };
  if (both(" between hosts") || travels(signature) != travels(other_signature))
    return "Use the same compression and the same kind of device on all workers";
  return kSameCalls;
}

// If only one of the two texts says " on GPU", adds " on CPU" to the other text.
void tell_devices(std::string* one, std::string* other) {
  const bool on_gpu = one->find(kOnGpu) != std::string::npos, other_on_gpu = other->find(kOnGpu) != std::string::npos;
  if (on_gpu == other_on_gpu) return;
  std::string& text = on_gpu ? *other : *one;
  size_t at = text.size();
  for (const char* rest : {", as ", ", compressed by "}) at = std::min(at, text.find(rest));
  text.insert(at, " on CPU");
}

constexpr size_t kMostShown = 300;  // bytes to show of each of the two texts
constexpr size_t kHeadShown = 110;
constexpr size_t kBefore = 30;  // bytes before the difference
constexpr size_t kMostDigits = 9;

// The position of ": " in a text such as 'a group of 40: float32 (3, 4), float32 (3,)'; npos if it is not such a text.
size_t arrays_begin(const std::string& text) {
  const std::string group = "a group of ";
  const size_t at = text.find(group);
  if (at == std::string::npos) return at;
  const size_t end = text.find_first_not_of("0123456789", at + group.size());
  if (end == std::string::npos || end == at + group.size() || end - at - group.size() > kMostDigits)
    return std::string::npos;
  return text.compare(end, 2, ": ") == 0 ? end : std::string::npos;
}

// In the text 'a group of N: ...', the array whose description contains position `at`, in the form
// ', array 40: float32 (3,)'; empty if `at` is after the arrays. `arrays`: what arrays_begin() returned for the text.
std::string array_at(const std::string& text, size_t arrays, size_t at) {
  size_t begin = arrays + 2, number = 1, end = begin;
  for (int depth = 0; end < text.size(); ++end) {
    depth += text[end] == '(' ? 1 : text[end] == ')' ? -1 : 0;
    if (depth < 0) break;  // the end of the signature after a label
    if (depth > 0 || text.compare(end, 2, ", ") != 0) continue;
    if (end >= at) break;
    begin = end + 2;
    ++number;
  }
  if (at > end || number > std::stoull(text.substr(text.rfind(' ', arrays) + 1))) return {};
  return ", array " + std::to_string(number) + ": " + text.substr(begin, end - begin);
}

// Shortens two texts for an error message if one of them is too long, so that the message shows where they differ.
void show_where_they_differ(std::string* one, std::string* other) {
  if (std::max(one->size(), other->size()) <= kMostShown) return;
  const size_t common =
      static_cast<size_t>(std::mismatch(one->begin(), one->end(), other->begin(), other->end()).first - one->begin());
  const size_t arrays = arrays_begin(*one);
  if (arrays < common && arrays < kMostShown && arrays_begin(*other) == arrays) {
    std::string array = array_at(*one, arrays, common), other_array = array_at(*other, arrays, common);
    const std::string head = one->substr(0, arrays);
    const bool open = std::count(head.begin(), head.end(), '(') > std::count(head.begin(), head.end(), ')');
    if (!array.empty() && !other_array.empty() && array.size() < kMostShown && other_array.size() < kMostShown) {
      *one = head + array + (open ? ")" : "");
      *other = head + other_array + (open ? ")" : "");
      return;
    }
  }
  for (std::string* text : {one, other}) {
    const std::string_view head = beginning(*text, kHeadShown);
    const size_t from = common > head.size() + kBefore ? beginning(*text, common - kBefore).size() : head.size();
    const std::string_view rest = std::string_view(*text).substr(from);
    const std::string_view shown = beginning(rest, kMostShown - kHeadShown);
    std::string shorter(head);
    if (from > head.size()) shorter += " ... ";
    shorter += shown;
    if (shown.size() < rest.size()) shorter += " ...";
    *text = shorter;
  }
}

// The options that `others` lacks; all options if it lacks none.
std::vector<std::string> differing(const std::vector<std::string>& options, const std::vector<std::string>& others) {
  std::vector<std::string> kept;
  std::copy_if(options.begin(), options.end(), std::back_inserter(kept), [&](const std::string& option) {
    return std::find(others.begin(), others.end(), option) == others.end();
  });
  return kept.empty() ? options : kept;
}

}  // namespace

std::string signature_of(const Operation& operation, const std::string& shape, int root_label, const std::string& label,
                         const std::vector<Shard>* shards) {
  const std::string root = shards != nullptr ? shards_text(*shards) : "rank " + std::to_string(root_label);
  std::string text;
  if (operation.kind == Kind::broadcast) {
    text = "broadcast from " + root;
  } else if (operation.kind == Kind::alltoall) {
    text = "alltoall from " + root;
  } else {
    text = std::string(operation.kind == Kind::reduce ? "reduce to " + root + ", " : "allreduce ") +
           reduce_op_name(operation.reduce_op);
    if (operation.scale != 1.0) {
      char number[32];
      std::snprintf(number, sizeof number, "%.17g", operation.scale);
      text += std::string(" times ") + number;
    }
  }
  text += std::string(" of ") + dtype_name(operation.dtype) + " " + shape;
  if (operation.road != DataPath::host) text += kOnGpu;
  if (operation.road == DataPath::nccl) text += " by NCCL";
  if (operation.wire) text += std::string(", as ") + dtype_name(*operation.wire) + " between hosts";
  if (operation.compressor != nullptr) text += ", compressed by '" + operation.compressor->text() + "' between hosts";
  return labelled(label, text);
}

std::string labelled(const std::string& label, const std::string& signature) {
  return label.empty() ? signature : label + kAfterLabel + signature;
}

std::string shown(const std::string& signature) {
  const size_t end = signature.find(kAfterLabel);
  if (end == std::string::npos) return signature;
  return joined(options_of(signature.substr(0, end))) + " (" + signature.substr(end + 1) + ")";
}

std::string shown_name(const std::string& name, const std::string& signature) {
  const size_t end = name.find('/');
  const std::string scope = name.substr(0, end), set = "set", call = "call/";
  const bool is_set = scope.compare(0, set.size(), set) == 0 && scope.size() > set.size() &&
                      scope.find_first_not_of("0123456789", set.size()) == std::string::npos;
  if (end == std::string::npos || (scope != "world" && !is_set)) return name;
  const std::string of = is_set ? " of process set " + scope.substr(set.size()) : "";
  const std::string rest = name.substr(end + 1);
  if (rest == "unnamed") return "an operation without a name" + of;
  if (rest == "waiting") {
    const size_t label = signature.find(kAfterLabel);
    return (label == std::string::npos ? "a call that waits" : options_of(signature.substr(0, label))[0]) + of;
  }
  if (rest.compare(0, call.size(), call) == 0) return "'" + rest.substr(call.size()) + "'" + of;
  return rest + of;
}

std::string difference(const std::string& name, int rank, const std::string& signature, int other_rank,
                       const std::string& other_signature) {
  std::string one = shown(signature), other = shown(other_signature);
  const size_t end = signature.find(kAfterLabel), other_end = other_signature.find(kAfterLabel);
  if (end != std::string::npos && other_end != std::string::npos) {
    const std::vector<std::string> options = options_of(signature.substr(0, end));
    const std::vector<std::string> other_options = options_of(other_signature.substr(0, other_end));
    if (options != other_options) {
      one = joined(differing(options, other_options));
      other = joined(differing(other_options, options));
    } else if (arrays_of(signature) != arrays_of(other_signature)) {
      one = joined(options) + arrays_of(signature);
      other = joined(options) + arrays_of(other_signature);
    }
  }
  tell_devices(&one, &other);
  const std::string advice = remedy(one, other, signature, other_signature);
  show_where_they_differ(&one, &other);
  if (one == other) other += " (the texts are too long for a message, and differ in parts that are not shown)";
  return shown_name(name) + " differs between ranks: rank " + std::to_string(rank) + " has " + one + ", rank " +
         std::to_string(other_rank) + " has " + other + ". " + advice;
}

}  // namespace mykv
