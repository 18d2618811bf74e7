"""The paper's two systems, whole: `vitdet` finds objects, `vivit` names actions."""
