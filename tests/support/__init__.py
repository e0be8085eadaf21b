"""What tests of several folders share: machines that fail, brokers, clients, data, waiting."""
