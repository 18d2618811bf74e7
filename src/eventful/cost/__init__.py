"""What steps cost: operations counted, bytes held, milliseconds measured."""
