"""The paper's two systems, `vitdet` and `vivit`, and `focus`, a trained saliency model."""
