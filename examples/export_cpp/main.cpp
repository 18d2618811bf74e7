// Runs a folder of `eventful export --to aoti` on raw frames, without Python.
//
//   export_cpp FOLDER FRAMES.bin OUTPUTS.bin
//
// FRAMES.bin holds frames of the exported size and type, one after the other. The first output of
// the model for each frame is written to OUTPUTS.bin, and a line for each step to stdout. Of a
// frame that is not finite NaN is written, and the exit status is 1 in the end.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

using Loader = torch::inductor::AOTIModelPackageLoader;

struct StateEntry {
  torch::ScalarType dtype;
  bool optional;  // NaN stands for a missing value, and a flush does not write it
  std::vector<int64_t> shape;
};

// What `layout.txt` of the folder says.
struct Layout {
  torch::ScalarType dtype = torch::kFloat32;  // of the frames
  std::vector<int64_t> frame;
  int64_t tokens = 0, forced = 0, cap = 0, floor = 0, outputs = 0;
  std::vector<float> levels;
  std::string dense;
  std::map<int64_t, std::string> steps;  // by width, rising
  std::vector<StateEntry> state;
};

torch::ScalarType kind(const std::string& name) {
  if (name == "float32") return torch::kFloat32;
  if (name == "float16") return torch::kFloat16;
  if (name == "bfloat16") return torch::kBFloat16;
  throw std::runtime_error("dtype " + name + " is not read by this example");
}

// A file of the folder: its name must not lead out of it.
std::string file_name(const std::string& name) {
  if (name.empty() || name[0] == '.' || name.find_first_of("/\\") != std::string::npos)
    throw std::runtime_error("layout.txt names '" + name + "', which is no file of the folder");
  return name;
}

// Numbers up to the end of a line, each at least 1.
std::vector<int64_t> sides(std::istringstream& words) {
  std::vector<int64_t> made;
  for (int64_t side; words >> side;) made.push_back(side);
  if (!words.eof() || made.empty() || *std::min_element(made.begin(), made.end()) < 1)
    throw std::runtime_error("layout.txt has a shape that is none");
  words.clear();  // the end of the line is no error
  return made;
}

void read_line(const std::string& line, Layout& made) {
  std::istringstream words(line);
  std::string what, word;
  words >> what;
  if (what == "format") {
    int number = 0;
    words >> number;
    if (number != 1) throw std::runtime_error("this example reads format 1");
  } else if (what == "frame") {
    words >> word;
    made.dtype = kind(word);
    made.frame = sides(words);
  } else if (what == "tokens") {
    words >> made.tokens;
  } else if (what == "forced") {
    words >> made.forced;
  } else if (what == "limits") {
    words >> made.cap >> made.floor;
  } else if (what == "levels") {
    // A stream of numbers does not read "inf".
    while (words >> word) made.levels.push_back(std::stof(word));
    words.clear();
  } else if (what == "outputs") {
    words >> made.outputs;
  } else if (what == "dense") {
    words >> word;
    made.dense = file_name(word);
  } else if (what == "step") {
    int64_t width = 0;
    words >> width >> word;
    made.steps[width] = file_name(word);
  } else if (what == "state") {
    StateEntry one;
    std::string input, output, dtype;
    words >> input >> output >> dtype >> one.optional;
    one.dtype = kind(dtype);
    one.shape = sides(words);
    made.state.push_back(one);
  }
  if (words.fail()) throw std::runtime_error("layout.txt has a line that is not read: " + line);
}

Layout read_layout(const std::string& folder) {
  std::ifstream file(folder + "/layout.txt");
  if (!file) throw std::runtime_error(folder + " holds no layout.txt: export with --to aoti");
  Layout made;
  for (std::string line; std::getline(file, line);) {
    try {
      read_line(line, made);
    } catch (const std::logic_error&) {  // of std::stof
      throw std::runtime_error("layout.txt has a line that is not read: " + line);
    }
  }
  if (made.dense.empty() || made.steps.empty() || made.frame.size() != 4 ||
      made.levels.size() != 4 || made.tokens < 1 || made.outputs < 1 || made.forced < 0 ||
      made.cap < 0 || made.floor < 0 || made.steps.begin()->first < 1)
    throw std::runtime_error("layout.txt lacks a line, or a number of it cannot be: export again");
  return made;
}

struct Record {
  int64_t updated = 0;
  bool flushed = false;
  bool finite = true;  // otherwise the output is NaN, and the next frame is computed whole
};

// The graphs of a folder.
struct Graphs {
  explicit Graphs(const std::string& folder) : layout(read_layout(folder)) {
    dense = std::make_unique<Loader>(folder + "/" + layout.dense);
    for (const auto& [width, file] : layout.steps)
      steps[width] = std::make_unique<Loader>(folder + "/" + file);
  }

  Layout layout;
  std::unique_ptr<Loader> dense;
  std::map<int64_t, std::unique_ptr<Loader>> steps;
};

// One video: its memory, and the choice of the graph.
class Stream {
 public:
  explicit Stream(Graphs& graphs) : graphs_(graphs) {
    for (const auto& one : graphs.layout.state) {
      // Missing values are NaN, which only floating-point entries are.
      state_.push_back(torch::full(one.shape, one.optional ? NAN : 0.0, one.dtype));
    }
  }

  torch::Tensor step(const torch::Tensor& frame) {
    if (frames_ < 0) return flush(frame);
    const Layout& layout = graphs_.layout;
    auto chosen = graphs_.steps.lower_bound(layout.cap + layout.forced);
    if (chosen == graphs_.steps.end()) chosen = std::prev(chosen);
    std::vector<at::Tensor> inputs = {
        frame, torch::tensor({frames_ + 1}, torch::kInt64),
        torch::tensor({layout.cap, layout.floor}, torch::kInt64), torch::tensor(layout.levels)};
    inputs.insert(inputs.end(), state_.begin(), state_.end());  // written in place
    auto outputs = run(*chosen->second, inputs, layout.outputs + 4);
    auto report = outputs[layout.outputs];
    // The columns of the report are in docs/export.md. An error without bound looks like a cut.
    if (report[0][1].item<int>() == 0) return refused(outputs[0]);
    if (report[0][2].item<int>() > 0) return flush(frame);  // the scene was cut
    if (report[0][4].item<int>() == 0) return refused(outputs[0]);
    frames_ += 1;
    last = {outputs[layout.outputs + 2].item<int64_t>(), false};
    return outputs[0].clone();  // it may be the memory, which the next step writes to
  }

  torch::Tensor flush(const torch::Tensor& frame) {
    const Layout& layout = graphs_.layout;
    const auto written = std::count_if(layout.state.begin(), layout.state.end(),
                                       [](const StateEntry& one) { return !one.optional; });
    auto outputs = run(*graphs_.dense, {frame}, layout.outputs + 1 + written);
    if (outputs[layout.outputs][0][4].item<int>() == 0) return refused(outputs[0]);
    size_t next = layout.outputs + 1;
    for (size_t i = 0; i < state_.size(); ++i)
      if (!layout.state[i].optional) state_[i].copy_(outputs[next++]);
    frames_ = 0;
    last = {layout.tokens, true};
    return outputs[0];
  }

  Record last;

 private:
  // The outputs of a graph, at least as many as the layout says.
  static std::vector<torch::Tensor> run(Loader& graph, const std::vector<at::Tensor>& inputs,
                                        int64_t least) {
    auto outputs = graph.run(inputs);
    if (static_cast<int64_t>(outputs.size()) < least)
      throw std::runtime_error("layout.txt says more outputs than a graph has: export again");
    return outputs;
  }

  // After a frame that is not finite, or gave something that is not.
  torch::Tensor refused(const torch::Tensor& output) {
    frames_ = -1;
    last = {0, false, false};
    return torch::full_like(output, output.is_floating_point() ? NAN : 0.0);
  }

  Graphs& graphs_;
  std::vector<torch::Tensor> state_;
  int64_t frames_ = -1;  // since everything was computed
};

int main(int count, char** arguments) {
  if (count != 4) {
    std::cerr << "usage: export_cpp FOLDER FRAMES.bin OUTPUTS.bin\n";
    return 2;
  }
  try {
    torch::InferenceMode guard;
    Graphs graphs(arguments[1]);
    Stream stream(graphs);
    std::ifstream frames(arguments[2], std::ios::binary);
    std::ofstream results(arguments[3], std::ios::binary);
    if (!frames || !results) throw std::runtime_error("the frames or the results cannot be opened");
    torch::Tensor frame = torch::empty(graphs.layout.frame, graphs.layout.dtype);
    const auto bytes = static_cast<std::streamsize>(frame.nbytes());
    int64_t bad = 0;
    while (frames.read(static_cast<char*>(frame.data_ptr()), bytes)) {
      const auto start = std::chrono::steady_clock::now();
      torch::Tensor output = stream.step(frame).contiguous();
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - start;
      results.write(static_cast<const char*>(output.data_ptr()),
                    static_cast<std::streamsize>(output.nbytes()));
      const Record& last = stream.last;
      bad += last.finite ? 0 : 1;
      std::cout << (!last.finite ? "not finite " : last.flushed ? "whole " : "step ")
                << last.updated << " tokens, " << took.count() << " ms\n";
    }
    if (frames.gcount() != 0)
      throw std::runtime_error("the last frame is not whole: " + std::to_string(frames.gcount()) +
                               " of " + std::to_string(bytes) + " bytes");
    if (!results.flush()) throw std::runtime_error("the results cannot be written");
    if (bad > 0) throw std::runtime_error(std::to_string(bad) + " frames were not finite");
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
