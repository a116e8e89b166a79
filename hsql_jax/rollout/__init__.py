"""Generation on the policy's own parameters, and the policies that sit in the environment."""
