"""How a network answers: draws, temperature, and the Prediction that holds the result."""
