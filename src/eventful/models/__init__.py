"""The paper's two complete systems: `vitdet` for detection, `vivit` for action recognition."""
