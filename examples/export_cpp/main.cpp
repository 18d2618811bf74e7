// Runs a folder of `eventful export --to aoti` on raw frames, without Python.
//
//   export_cpp FOLDER FRAMES.bin OUTPUTS.bin
//
// FRAMES.bin holds float32 frames of the exported size, one after the other. The first output of
// the model for each frame is written to OUTPUTS.bin, and a line for each step to stdout.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <chrono>
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
  std::vector<int64_t> frame;
  int64_t tokens = 0, forced = 0, cap = 0, floor = 0, outputs = 0;
  std::vector<float> levels;
  std::string dense;
  std::map<int64_t, std::string> steps;  // by width, rising
  std::vector<StateEntry> state;
};

torch::ScalarType kind(const std::string& name) {
  if (name == "float32") return torch::kFloat32;
  if (name == "bfloat16") return torch::kBFloat16;
  throw std::runtime_error("dtype " + name + " is not read by this example");
}

Layout read_layout(const std::string& folder) {
  std::ifstream file(folder + "/layout.txt");
  if (!file) throw std::runtime_error(folder + " holds no layout.txt: export with --to aoti");
  Layout made;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string what, word;
    words >> what;
    if (what == "format") {
      int number = 0;
      words >> number;
      if (number != 1) throw std::runtime_error("this example reads format 1");
    } else if (what == "frame") {
      words >> word;
      kind(word);
      for (int64_t side; words >> side;) made.frame.push_back(side);
    } else if (what == "tokens") {
      words >> made.tokens;
    } else if (what == "forced") {
      words >> made.forced;
    } else if (what == "limits") {
      words >> made.cap >> made.floor;
    } else if (what == "levels") {
      // A stream of numbers does not read "inf".
      while (words >> word) made.levels.push_back(std::stof(word));
    } else if (what == "outputs") {
      words >> made.outputs;
    } else if (what == "dense") {
      words >> made.dense;
    } else if (what == "step") {
      int64_t width = 0;
      words >> width >> word;
      made.steps[width] = word;
    } else if (what == "state") {
      StateEntry one;
      std::string input, output, dtype;
      words >> input >> output >> dtype >> one.optional;
      one.dtype = kind(dtype);
      for (int64_t side; words >> side;) one.shape.push_back(side);
      made.state.push_back(one);
    }
  }
  return made;
}

struct Record {
  int64_t updated = 0;
  bool flushed = false;
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
    auto outputs = chosen->second->run(inputs);
    auto report = outputs[layout.outputs];
    if (report[0][2].item<int>() > 0) return flush(frame);  // the scene was cut
    frames_ += 1;
    last = {outputs[layout.outputs + 2].item<int64_t>(), false};
    return outputs[0];
  }

  torch::Tensor flush(const torch::Tensor& frame) {
    auto outputs = graphs_.dense->run({frame});
    size_t next = graphs_.layout.outputs + 1;
    for (size_t i = 0; i < state_.size(); ++i)
      if (!graphs_.layout.state[i].optional) state_[i].copy_(outputs[next++]);
    frames_ = 0;
    last = {graphs_.layout.tokens, true};
    return outputs[0];
  }

  Record last;

 private:
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
    torch::Tensor frame = torch::empty(graphs.layout.frame);
    const auto bytes = static_cast<std::streamsize>(frame.nbytes());
    while (frames.read(static_cast<char*>(frame.data_ptr()), bytes)) {
      const auto start = std::chrono::steady_clock::now();
      torch::Tensor output = stream.step(frame).contiguous();
      const std::chrono::duration<double, std::milli> took =
          std::chrono::steady_clock::now() - start;
      results.write(static_cast<const char*>(output.data_ptr()),
                    static_cast<std::streamsize>(output.nbytes()));
      std::cout << (stream.last.flushed ? "whole " : "step ") << stream.last.updated << " tokens, "
                << took.count() << " ms\n";
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
