"""Text generation and scoring with a trained model."""
