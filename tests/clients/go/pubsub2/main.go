// Runs the scenarios with cloud.google.com/go/pubsub/v2.
package main

import (
	"context"
	"time"

	"cloud.google.com/go/iam/apiv1/iampb"
	"cloud.google.com/go/pubsub/v2"
	apiv1 "cloud.google.com/go/pubsub/v2/apiv1"
	"cloud.google.com/go/pubsub/v2/apiv1/pubsubpb"
	"google.golang.org/api/option"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	scenarios "landline.test/clients"
)

type client struct {
	*pubsub.Client
	parent     string
	publishers map[string]*pubsub.Publisher
}

func main() {
	scenarios.Main(func(ctx context.Context, project string, options ...option.ClientOption) (scenarios.Client, error) {
		inner, err := pubsub.NewClient(ctx, project, options...)
		return &client{inner, "projects/" + project, map[string]*pubsub.Publisher{}}, err
	})
}

func (c *client) topic(id string) string        { return c.parent + "/topics/" + id }
func (c *client) subscription(id string) string { return c.parent + "/subscriptions/" + id }
func (c *client) snapshot(id string) string     { return c.parent + "/snapshots/" + id }

func (c *client) CreateTopic(ctx context.Context, topic, avroSchema string) error {
	request := &pubsubpb.Topic{Name: c.topic(topic)}
	if avroSchema != "" {
		schema, err := c.createSchema(ctx, avroSchema)
		if err != nil {
			return err
		}
		request.SchemaSettings = &pubsubpb.SchemaSettings{Schema: schema.Name, Encoding: pubsubpb.Encoding_JSON}
	}
	_, err := c.TopicAdminClient.CreateTopic(ctx, request)
	return err
}

func (c *client) createSchema(ctx context.Context, avroSchema string) (*pubsubpb.Schema, error) {
	schemas, err := apiv1.NewSchemaClient(ctx, scenarios.SchemaOptions()...)
	if err != nil {
		return nil, err
	}
	defer schemas.Close()
	schema := &pubsubpb.Schema{Type: pubsubpb.Schema_AVRO, Definition: avroSchema}
	return schemas.CreateSchema(ctx, &pubsubpb.CreateSchemaRequest{Parent: c.parent, SchemaId: "order", Schema: schema})
}

func (c *client) CreateSubscription(ctx context.Context, subscription, topic string, options scenarios.Options) error {
	request := &pubsubpb.Subscription{
		Name:                      c.subscription(subscription),
		Topic:                     c.topic(topic),
		EnableMessageOrdering:     options.Ordered,
		EnableExactlyOnceDelivery: options.ExactlyOnce,
		RetainAckedMessages:       options.RetainAcked,
		Filter:                    options.Filter,
	}
	if options.DeadLetterTopic != "" {
		name := c.topic(options.DeadLetterTopic)
		request.DeadLetterPolicy = &pubsubpb.DeadLetterPolicy{DeadLetterTopic: name, MaxDeliveryAttempts: 5}
	}
	_, err := c.SubscriptionAdminClient.CreateSubscription(ctx, request)
	return err
}

// publisher makes the topic's publisher when it is needed first.
func (c *client) publisher(topic string) *pubsub.Publisher {
	made := c.publishers[topic]
	if made == nil {
		made = c.Publisher(topic)
		made.EnableMessageOrdering = true
		made.PublishSettings.Timeout = scenarios.Outage
		c.publishers[topic] = made
	}
	return made
}

func (c *client) UseTopic(ctx context.Context, topic string) error {
	c.publisher(topic)
	_, err := c.TopicAdminClient.GetTopic(ctx, &pubsubpb.GetTopicRequest{Topic: c.topic(topic)})
	return err
}

func (c *client) Compress(topic string) {
	c.publisher(topic).PublishSettings.EnableCompression = true
	c.publisher(topic).PublishSettings.CompressionBytesThreshold = 1
}

func (c *client) Update(ctx context.Context, subscription string, to scenarios.Shown) (scenarios.Shown, error) {
	name := c.subscription(subscription)
	request := &pubsubpb.UpdateSubscriptionRequest{
		Subscription: &pubsubpb.Subscription{
			Name:               name,
			AckDeadlineSeconds: int32(to.AckDeadlineSeconds),
			Labels:             map[string]string{"team": to.Label},
		},
		UpdateMask: &fieldmaskpb.FieldMask{Paths: []string{"ack_deadline_seconds", "labels"}},
	}
	if _, err := c.SubscriptionAdminClient.UpdateSubscription(ctx, request); err != nil {
		return scenarios.Shown{}, err
	}
	got, err := c.SubscriptionAdminClient.GetSubscription(ctx, &pubsubpb.GetSubscriptionRequest{Subscription: name})
	return scenarios.Shown{AckDeadlineSeconds: int(got.GetAckDeadlineSeconds()), Label: got.GetLabels()["team"]}, err
}

// policies is a client for access policies. That of schemas takes the names of all resources; the others have no such calls.
func policies(ctx context.Context) (*apiv1.SchemaClient, error) {
	return apiv1.NewSchemaClient(ctx, scenarios.SchemaOptions()...)
}

func (c *client) AddMember(ctx context.Context, topic, role, member string) ([]string, error) {
	client, err := policies(ctx)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	policy, err := client.GetIamPolicy(ctx, &iampb.GetIamPolicyRequest{Resource: c.topic(topic)})
	if err != nil {
		return nil, err
	}
	policy.Bindings = append(policy.Bindings, &iampb.Binding{Role: role, Members: []string{member}})
	if _, err := client.SetIamPolicy(ctx, &iampb.SetIamPolicyRequest{Resource: c.topic(topic), Policy: policy}); err != nil {
		return nil, err
	}
	policy, err = client.GetIamPolicy(ctx, &iampb.GetIamPolicyRequest{Resource: c.topic(topic)})
	if err != nil {
		return nil, err
	}
	var members []string
	for _, binding := range policy.Bindings {
		if binding.Role == role {
			members = append(members, binding.Members...)
		}
	}
	return members, nil
}

func (c *client) TestPermissions(ctx context.Context, topic string, permissions []string) ([]string, error) {
	client, err := policies(ctx)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	request := &iampb.TestIamPermissionsRequest{Resource: c.topic(topic), Permissions: permissions}
	answer, err := client.TestIamPermissions(ctx, request)
	return answer.GetPermissions(), err
}

func (c *client) Publish(ctx context.Context, topic string, m scenarios.Message) func() (string, error) {
	message := &pubsub.Message{Data: m.Data, Attributes: m.Attributes, OrderingKey: m.Key}
	result := c.publisher(topic).Publish(ctx, message)
	return func() (string, error) { return result.Get(ctx) }
}

func (c *client) Receive(ctx context.Context, subscription string, maxOutstanding int, handle func(scenarios.Message)) error {
	sub := c.Subscriber(subscription)
	sub.ReceiveSettings.MaxOutstandingMessages = maxOutstanding
	return sub.Receive(ctx, func(_ context.Context, m *pubsub.Message) {
		got := scenarios.Message{ID: m.ID, Key: m.OrderingKey, Data: m.Data, Attributes: m.Attributes, Ack: m.Ack, Nack: m.Nack}
		if m.DeliveryAttempt != nil {
			got.Attempt = *m.DeliveryAttempt
		}
		got.AckConfirmed = func(ctx context.Context) (bool, error) {
			status, err := m.AckWithResult().Get(ctx)
			return status == pubsub.AcknowledgeStatusSuccess, err
		}
		handle(got)
	})
}

func (c *client) Seek(ctx context.Context, subscription string, to time.Time) error {
	target := &pubsubpb.SeekRequest_Time{Time: timestamppb.New(to)}
	_, err := c.SubscriptionAdminClient.Seek(ctx, &pubsubpb.SeekRequest{Subscription: c.subscription(subscription), Target: target})
	return err
}

func (c *client) Snapshot(ctx context.Context, subscription, snapshot string) error {
	request := &pubsubpb.CreateSnapshotRequest{Name: c.snapshot(snapshot), Subscription: c.subscription(subscription)}
	_, err := c.SubscriptionAdminClient.CreateSnapshot(ctx, request)
	return err
}

func (c *client) SeekSnapshot(ctx context.Context, subscription, snapshot string) error {
	target := &pubsubpb.SeekRequest_Snapshot{Snapshot: c.snapshot(snapshot)}
	_, err := c.SubscriptionAdminClient.Seek(ctx, &pubsubpb.SeekRequest{Subscription: c.subscription(subscription), Target: target})
	return err
}

func (c *client) Detach(ctx context.Context, subscription string) (bool, error) {
	name := c.subscription(subscription)
	if _, err := c.TopicAdminClient.DetachSubscription(ctx, &pubsubpb.DetachSubscriptionRequest{Subscription: name}); err != nil {
		return false, err
	}
	got, err := c.SubscriptionAdminClient.GetSubscription(ctx, &pubsubpb.GetSubscriptionRequest{Subscription: name})
	return got.GetDetached(), err
}
