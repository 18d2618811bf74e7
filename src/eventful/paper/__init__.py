"""The paper's data sets, evaluation, training and experiments; nothing in the core imports it."""
