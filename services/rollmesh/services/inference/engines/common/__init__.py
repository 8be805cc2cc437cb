"""What the engines share: sampling, stop strings, checks of requests, adapters, and weights in host memory."""
